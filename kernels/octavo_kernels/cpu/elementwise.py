"""Norms, activation functions, sums, embedding and argmax on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels import reference
from octavo_kernels.cpu.library import DTYPES, as_contiguous, get_library, norm_dtype, threads_for


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `octavo_kernels.rms_norm`."""
    library, dtype, weight_dtype = get_library(), DTYPES.get(x.dtype), norm_dtype(weight, x.dtype)
    if library is None or dtype is None or weight_dtype is None:
        return reference.rms_norm(x, weight, eps)
    x, weight = as_contiguous(x), as_contiguous(weight)
    out = torch.empty_like(x)
    width, elements = x.shape[-1], x.numel()
    op = library.pack(
        "rms_norm",
        x.data_ptr(),
        0,
        weight.data_ptr(),
        out.data_ptr(),
        0,
        elements // width,
        width,
        dtype,
        weight_dtype,
        eps,
    )
    library.run(op, threads_for(elements))
    return out


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `octavo_kernels.fused_add_rms_norm`."""
    library, dtype, weight_dtype = get_library(), DTYPES.get(x.dtype), norm_dtype(weight, x.dtype)
    if library is None or dtype is None or weight_dtype is None or residual.dtype != x.dtype:
        return reference.fused_add_rms_norm(x, residual, weight, eps)
    x, residual, weight = as_contiguous(x), as_contiguous(residual), as_contiguous(weight)
    out, total = torch.empty_like(x), torch.empty_like(x)
    width, elements = x.shape[-1], x.numel()
    op = library.pack(
        "rms_norm",
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        total.data_ptr(),
        elements // width,
        width,
        dtype,
        weight_dtype,
        eps,
    )
    library.run(op, threads_for(elements))
    return out, total


def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest index of a largest element of each row of ``x [R, N]``, int64 [R], and that element [R].

    A row with a NaN gives its first NaN. torch's argmax is not vectorised on CPUs; numpy's is, but on one thread.
    """
    library = get_library()
    if library is None or x.dtype != torch.float32 or x.stride(1) != 1 or not x.shape[1]:
        index = torch.from_numpy(x.numpy().argmax(-1)) if x.dtype != torch.bfloat16 else x.argmax(-1)
        return index, x.gather(1, index[:, None])[:, 0]
    index, best = torch.empty(len(x), dtype=torch.int64), torch.empty(len(x))
    op = library.pack("argmax", x.data_ptr(), index.data_ptr(), best.data_ptr(), *x.shape, x.stride(0))
    library.run(op, threads_for(x.numel()) if len(x) > 1 else 1)
    return index, best


def silu_and_mul(x: Tensor) -> Tensor:
    """See `octavo_kernels.silu_and_mul`."""
    library, dtype = get_library(), DTYPES.get(x.dtype)
    if library is None or dtype is None:
        return reference.silu_and_mul(x)
    x = as_contiguous(x)
    width = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], width))
    op = library.pack("silu_and_mul", x.data_ptr(), out.data_ptr(), out.numel() // max(width, 1), width, dtype)
    library.run(op, threads_for(out.numel()))
    return out


# csrc/elementwise_ops.h: enum activation
ACTIVATIONS = {"relu": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "none": 5, "sigmoid": 6}


def activate(x: Tensor, kind: str, gated: bool = False, up: Tensor | None = None) -> Tensor:
    """See `octavo_kernels.activate`."""
    library, dtype = get_library(), DTYPES.get(x.dtype)
    if library is None or dtype is None or (up is not None and (up.dtype != x.dtype or up.stride(-1) != 1)):
        return reference.activate(x, kind, gated, up)
    x = x if x.ndim == 2 and x.stride(1) == 1 else as_contiguous(x)
    stride = x.stride(0) if x.ndim == 2 else x.shape[-1]
    width = x.shape[-1] // 2 if gated else x.shape[-1]
    if gated:
        up_address, up_stride = x.data_ptr() + width * x.element_size(), stride
    else:
        up_address, up_stride = (0, 0) if up is None else (up.data_ptr(), up.stride(0))
    out = x.new_empty((*x.shape[:-1], width))
    op = library.pack(
        "activation",
        x.data_ptr(),
        up_address,
        out.data_ptr(),
        out.numel() // max(width, 1),
        width,
        ACTIVATIONS[kind],
        stride,
        up_stride,
        dtype,
    )
    library.run(op, threads_for(out.numel()))
    return out


def add(x: Tensor, y: Tensor) -> Tensor:
    """See `octavo_kernels.add`."""
    library, dtype = get_library(), DTYPES.get(x.dtype)
    if library is None or dtype is None or y.dtype != x.dtype or y.shape != x.shape:
        return reference.add(x, y)
    x, y = as_contiguous(x), as_contiguous(y)
    out = torch.empty_like(x)
    width = x.shape[-1]
    op = library.pack("add", x.data_ptr(), y.data_ptr(), out.data_ptr(), x.numel() // max(width, 1), width, dtype)
    library.run(op, threads_for(x.numel()))
    return out


def scale(x: Tensor, factor: float, cap: float | None = None) -> Tensor:
    """See `octavo_kernels.scale`."""
    library, dtype = get_library(), DTYPES.get(x.dtype)
    if library is None or dtype is None:
        return reference.scale(x, factor, cap)
    x = as_contiguous(x)
    out, width = torch.empty_like(x), x.shape[-1]
    op = library.pack(
        "scale", x.data_ptr(), out.data_ptr(), x.numel() // max(width, 1), width, dtype, factor, cap or 0.0
    )
    library.run(op, threads_for(x.numel()))
    return out


def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """See `octavo_kernels.rms_norm_`."""
    library, dtype, weight_dtype = get_library(), DTYPES.get(x.dtype), norm_dtype(weight, x.dtype)
    if library is None or dtype is None or weight_dtype is None or x.stride(1) != 1:
        return reference.rms_norm_(x, weight, eps)
    (rows, columns), weight = x.shape, as_contiguous(weight)
    width = weight.numel()
    op = library.pack(
        "rms_norm_columns",
        x.data_ptr(),
        weight.data_ptr(),
        rows,
        columns // width,
        width,
        x.stride(0),
        dtype,
        weight_dtype,
        eps,
    )
    library.run(op, threads_for(x.numel()))


def take_columns(x: Tensor, columns: Tensor) -> Tensor:
    """See `octavo_kernels.take_columns`."""
    library = get_library()
    if library is None or x.element_size() not in (2, 4):
        return reference.take_columns(x, columns)
    x, columns, width = as_contiguous(x), as_contiguous(columns, torch.int32), x.shape[-1]
    out = x.new_empty((*x.shape[:-1], columns.numel()))
    op = library.pack(
        "take_columns",
        x.data_ptr(),
        columns.data_ptr(),
        out.data_ptr(),
        x.numel() // max(width, 1),
        width,
        columns.numel(),
        x.element_size(),
    )
    library.run(op, threads_for(out.numel()))
    return out


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `octavo_kernels.layer_norm`."""
    library, dtype = get_library(), DTYPES.get(x.dtype)
    if library is None or dtype is None or any(t is not None and t.dtype != x.dtype for t in (weight, bias, residual)):
        return reference.layer_norm(x, weight, bias, eps, residual)
    x = as_contiguous(x)
    residual, weight, bias = (None if t is None else as_contiguous(t) for t in (residual, weight, bias))
    out, width, elements = torch.empty_like(x), x.shape[-1], x.numel()
    total = x if residual is None else torch.empty_like(x)
    addresses = (0 if t is None else t.data_ptr() for t in (residual, weight, bias))
    op = library.pack(
        "layer_norm",
        x.data_ptr(),
        *addresses,
        out.data_ptr(),
        total.data_ptr(),
        elements // width,
        width,
        dtype,
        eps,
    )
    library.run(op, threads_for(elements))
    return out, total


def embedding(ids: Tensor, weight: Tensor, first: int | None = None) -> Tensor:
    """See `octavo_kernels.embedding`."""
    library = get_library()
    if library is None or not weight.is_contiguous():
        return reference.embedding(ids, weight, first)
    ids = as_contiguous(ids, torch.int64)
    out = torch.empty((*ids.shape, weight.shape[1]), dtype=weight.dtype)
    row_bytes = weight.shape[1] * weight.element_size()
    op = library.pack(
        "embedding",
        ids.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        ids.numel(),
        weight.shape[0],
        row_bytes,
        -1 if first is None else first,
    )
    library.run(op, threads_for(out.numel()))
    return out
