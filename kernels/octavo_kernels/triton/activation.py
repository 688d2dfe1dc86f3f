"""Activations of MLPs, with or without a gate, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton.attention_tiles import tanh
from octavo_kernels.triton.dependent_launch import pdl_options, wait_for_previous_kernel

BLOCK = 1024  # elements of a program: 8 a thread, and many programs for a single row


@triton.jit
def activation_of(x, KIND: tl.constexpr):
    """Compute the activation KIND of ``x``, float32."""
    if KIND == "silu":
        out = x / (1.0 + tl.exp(-x))
    elif KIND == "gelu":
        out = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        out = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif KIND == "sigmoid":
        out = 1.0 / (1.0 + tl.exp(-x))
    elif KIND == "none":
        out = x
    else:
        out = tl.where(x < 0, 0.0, x)  # keeps NaN
    return out


@triton.jit
def gated_product(gate, up, limit, KIND: tl.constexpr, dtype: tl.constexpr):
    """``f(gate) * up`` of float32 with the roundings of `octavo_kernels.activate`, or "clamped_swiglu" (`Experts`)."""
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    if KIND == "clamped_swiglu":
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        out = (up + 1.0) * gate / (1.0 + tl.exp(-1.702 * gate))
    else:
        out = activation_of(gate, KIND).to(dtype).to(tl.float32) * up
    return out.to(dtype)


@triton.jit
def activate_kernel(
    x_ptr,
    x_stride,
    up_ptr,
    up_stride,
    out_ptr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows, blocks of BLOCK columns)."""
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    if GATED:
        up = tl.load(up_ptr + row * up_stride + columns, mask=inside, other=0.0)
        out = gated_product(x.to(tl.float32), up.to(tl.float32), 0.0, KIND, x.dtype)
    else:
        out = activation_of(x.to(tl.float32), KIND).to(x.dtype)
    tl.store(out_ptr + row * WIDTH + columns, out, mask=inside)


def activate(x: Tensor, kind: str, gated: bool = False, up: Tensor | None = None) -> Tensor:
    """See `octavo_kernels.activate`."""
    rows = x if x.stride(1) == 1 else x.contiguous()
    if gated:
        rows, up = rows.chunk(2, dim=1)
    elif up is not None and up.stride(1) != 1:
        up = up.contiguous()
    width, ups = rows.shape[1], rows if up is None else up
    out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    if out.numel():
        activate_kernel[(len(x), triton.cdiv(width, BLOCK))](
            rows,
            rows.stride(0),
            ups,
            ups.stride(0),
            out,
            WIDTH=width,
            KIND=kind,
            GATED=up is not None,
            BLOCK=BLOCK,
            num_warps=4,
            **pdl_options(x.device),
        )
    return out
