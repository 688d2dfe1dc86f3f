"""Norms, activation and linear, in the order of operations of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `octavo_kernels.rms_norm`."""
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide.to(torch.promote_types(x.dtype, weight.dtype))).to(x.dtype)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `octavo_kernels.fused_add_rms_norm`."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def silu_and_mul(x: Tensor) -> Tensor:
    """See `octavo_kernels.silu_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "none": lambda x: x,
    "sigmoid": torch.sigmoid,
}


def activate(x: Tensor, kind: str, gated: bool = False, up: Tensor | None = None) -> Tensor:
    """See `octavo_kernels.activate`."""
    if gated:
        x, up = x.chunk(2, dim=-1)
    out = _ACTIVATIONS[kind](x)
    return out if up is None else out * up


def add(x: Tensor, y: Tensor) -> Tensor:
    """See `octavo_kernels.add`."""
    return x + y


def scale(x: Tensor, factor: float, cap: float | None = None) -> Tensor:
    """See `octavo_kernels.scale`."""
    wide = (x if x.dtype == torch.float64 else x.float()) * factor
    return (wide if cap is None else cap * torch.tanh(wide / cap)).to(x.dtype)


def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """See `octavo_kernels.rms_norm_`."""
    heads = x.unflatten(1, (-1, weight.numel()))
    heads.copy_(rms_norm(heads, weight, eps))


def take_columns(x: Tensor, columns: Tensor) -> Tensor:
    """See `octavo_kernels.take_columns`."""
    return x[..., columns.long()]


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `octavo_kernels.layer_norm`."""
    total = x if residual is None else residual + x
    return functional.layer_norm(total, total.shape[-1:], weight, bias, eps), total


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `octavo_kernels.linear`."""
    return functional.linear(x, weight, bias)


def embedding(ids: Tensor, weight: Tensor, first: int | None = None) -> Tensor:
    """See `octavo_kernels.embedding`."""
    if first is None:
        return functional.embedding(ids, weight)
    local, elsewhere = split_ids(ids, first, len(weight))
    return functional.embedding(local, weight).masked_fill_(elsewhere[..., None], 0)


def split_ids(ids: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Rows of a table that holds ``rows`` ids from ``first`` on, and which ids it does not hold."""
    local = ids - first
    elsewhere = (local < 0) | (local >= rows)
    return local.masked_fill(elsewhere, 0), elsewhere
