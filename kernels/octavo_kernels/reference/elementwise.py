"""Norms, activation and linear, in the order of operations of Hugging Face transformers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `octavo_kernels.rms_norm`."""
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `octavo_kernels.fused_add_rms_norm`."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def silu_and_mul(x: Tensor) -> Tensor:
    """See `octavo_kernels.silu_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `octavo_kernels.linear`."""
    return functional.linear(x, weight, bias)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """See `octavo_kernels.embedding`."""
    return functional.embedding(ids, weight)
