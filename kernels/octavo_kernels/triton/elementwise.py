"""Norms (with or without residual), SiLU times up, scaling and embedding: each reads and writes everything once.

The order of roundings is that of Hugging Face transformers: the residual's sum is rounded to the model's dtype, the
norm is computed in float32 of the rounded sum, rounded, and multiplied by the weight (a float32 weight, as Gemma's,
comes before the rounding); the gate is rounded before the
product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton.attention_tiles import tanh
from octavo_kernels.triton.dependent_launch import pdl_options, wait_for_previous_kernel

BLOCK = 1024  # elements per program of silu_and_mul or embedding: 8 per thread, and many programs for a single row


@triton.jit
def rms_norm_kernel(
    x_ptr,
    x_stride,
    residual_ptr,
    residual_stride,
    weight_ptr,
    out_ptr,
    out_stride,
    total_ptr,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """Grid (rows, heads): RMS norm of a head of a row; with ADD of the sum of a row, whose only head it is, with the
    residual, which goes to ``total``."""
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    at = tl.program_id(1) * WIDTH + columns
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0)
    dtype = x.dtype
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(total_ptr + row * WIDTH + columns, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    normed = wide * scale
    if weight.dtype != tl.float32:  # else nothing is rounded before the product
        normed = normed.to(dtype).to(tl.float32)
    normed = normed * weight.to(tl.float32)
    tl.store(out_ptr + row * out_stride + at, normed.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `octavo_kernels.rms_norm`."""
    return _launch(x, None, weight, eps)[0]


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `octavo_kernels.fused_add_rms_norm`."""
    return _launch(x, residual, weight, eps)


def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """See `octavo_kernels.rms_norm_`."""
    if x.stride(1) == 1:
        _launch(x, None, weight, eps, x)
    else:
        x.copy_(rms_norm(x, weight, eps))


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    width = weight.numel()
    rows = _rows_of(x)
    added = rows if residual is None else _rows_of(residual)
    stride = width if out is None else out.stride(0)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        rms_norm_kernel[(len(rows), x.shape[-1] // width)](
            rows,
            rows.stride(0),
            added,
            added.stride(0),
            weight,
            out,
            stride,
            total,
            eps,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            ADD=residual is not None,
            num_warps=_warps_for(width),
            **pdl_options(x.device),
        )
    return out, total


@triton.jit
def layer_norm_kernel(
    x_ptr,
    x_stride,
    residual_ptr,
    residual_stride,
    weight_ptr,
    bias_ptr,
    out_ptr,
    total_ptr,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Grid (rows): layer norm of a row; with ADD of its sum with the residual, which goes to ``total``."""
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * WIDTH + columns, x, mask=inside)
    wide = x.to(tl.float32)
    centred = tl.where(inside, wide - tl.sum(wide, axis=0) / WIDTH, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / WIDTH + eps)
    if HAS_WEIGHT:
        normed = normed * tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        normed += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, normed.to(out_ptr.dtype.element_ty), mask=inside)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `octavo_kernels.layer_norm`."""
    width, rows = x.shape[-1], _rows_of(x)
    added = rows if residual is None else _rows_of(residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        layer_norm_kernel[(len(rows),)](
            rows,
            rows.stride(0),
            added,
            added.stride(0),
            rows if weight is None else weight,
            rows if bias is None else bias,
            out,
            total,
            eps,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            ADD=residual is not None,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            num_warps=_warps_for(width),
            **pdl_options(x.device),
        )
    return out, total


@triton.jit
def scale_kernel(
    x_ptr, x_stride, out_ptr, factor, cap, WIDTH: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (rows, blocks of BLOCK columns)."""
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32) * factor
    if HAS_CAP:
        x = cap * tanh(x / cap)
    tl.store(out_ptr + row * WIDTH + columns, x.to(out_ptr.dtype.element_ty), mask=inside)


def scale(x: Tensor, factor: float, cap: float | None = None) -> Tensor:
    """See `octavo_kernels.scale`."""
    width, rows = x.shape[-1], _rows_of(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        scale_kernel[(len(rows), triton.cdiv(width, BLOCK))](
            rows,
            rows.stride(0),
            out,
            float(factor),
            float(cap or 1.0),
            WIDTH=width,
            HAS_CAP=cap is not None,
            BLOCK=BLOCK,
            num_warps=4,
            **pdl_options(x.device),
        )
    return out


@triton.jit
def silu_and_mul_kernel(x_ptr, x_stride, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, blocks of BLOCK columns)."""
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * x_stride + WIDTH + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    gate = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    out = gate.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, out.to(up.dtype), mask=inside)


def silu_and_mul(x: Tensor) -> Tensor:
    """See `octavo_kernels.silu_and_mul`."""
    rows = _rows_of(x)
    width = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (len(rows), triton.cdiv(width, BLOCK))
        silu_and_mul_kernel[grid](
            rows, rows.stride(0), out, WIDTH=width, BLOCK=BLOCK, num_warps=4, **pdl_options(x.device)
        )
    return out


@triton.jit
def embedding_kernel(
    ids_ptr,
    weight_ptr,
    weight_stride,
    out_ptr,
    num_rows,
    first,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (ids, blocks of BLOCK columns). SPLIT: the table holds ids from ``first`` on, and the others' rows are 0."""
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    token = tl.load(ids_ptr + row).to(tl.int64)
    if SPLIT:
        token -= first
        held = inside & (token >= 0) & (token < num_rows)
        values = tl.load(weight_ptr + token * weight_stride + columns, mask=held, other=0)
    else:
        # Padding rows may have any id: clamp it to the table.
        token = tl.minimum(tl.maximum(token, 0), num_rows - 1)
        values = tl.load(weight_ptr + token * weight_stride + columns, mask=inside)
    tl.store(out_ptr + row * WIDTH + columns, values, mask=inside)


def embedding(ids: Tensor, weight: Tensor, first: int | None = None) -> Tensor:
    """See `octavo_kernels.embedding`."""
    width = weight.shape[1]
    ids = ids.contiguous()
    out = torch.empty(*ids.shape, width, dtype=weight.dtype, device=weight.device)
    if out.numel():
        grid = (ids.numel(), triton.cdiv(width, BLOCK))
        embedding_kernel[grid](
            ids,
            weight,
            weight.stride(0),
            out,
            weight.shape[0],
            first or 0,
            SPLIT=first is not None,
            WIDTH=width,
            BLOCK=BLOCK,
            num_warps=4,
            **pdl_options(ids.device),
        )
    return out


def _rows_of(x: Tensor) -> Tensor:
    """``x`` as [rows, width] with contiguous rows; a copy only if its strides require one."""
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _warps_for(width: int) -> int:
    """Warps for one program that reads ``width`` elements: about 16 to 32 a thread, so that a row is in flight at once
    and its reduction crosses few warps."""
    return 4 if width < 2048 else 8 if width < 8192 else 16
