"""Linears with weights of 16 or 32 bits on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels import reference
from octavo_kernels.cpu.library import (
    DTYPES,
    WEIGHT_DTYPES,
    as_contiguous,
    get_library,
    threads_for,
    threads_for_products,
)
from octavo_kernels.dense import DenseWeight


def fill_dense(data: Tensor, first: int, rows: Tensor) -> bool:
    """Put ``rows`` at channels ``first`` ... of a `DensePart`'s data, on this thread alone; False without C kernels."""
    library = get_library()
    if library is None:
        return False
    rows = as_contiguous(rows)
    op = library.pack(
        "pack_dense", rows.data_ptr(), data.data_ptr(), len(rows), first, rows.shape[1], WEIGHT_DTYPES[rows.dtype]
    )
    library.run(op, threads=1)
    return True


def dense_linear(
    x: Tensor, weight: DenseWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """See `octavo_kernels.dense_linear`."""
    library, dtype = get_library(), out_dtype or x.dtype
    if library is None or x.dtype not in DTYPES or dtype not in DTYPES:
        return reference.dense_linear(x, weight, bias, out_dtype)
    if x.shape[1] != weight.width:
        raise ValueError(f"x: rows of {x.shape[1]} values do not fit a weight of width {weight.width}")
    x = as_contiguous(x)
    bias = None if bias is None else as_contiguous(bias, torch.float32)
    out = torch.empty((len(x), weight.channels), dtype=dtype)
    program, offset = b"", 0
    for part in weight.parts:
        program += library.pack(
            "dense_linear",
            x.data_ptr(),
            part.data.data_ptr(),
            0 if bias is None else bias.data_ptr() + 4 * offset,
            out.data_ptr(),
            len(x),
            part.channels,
            weight.width,
            weight.channels,
            offset,
            DTYPES[x.dtype],
            WEIGHT_DTYPES[part.data.dtype],
            DTYPES[dtype],
        )
        offset += part.channels
    library.run(program, threads_for_products(len(x), weight.channels * weight.width))
    return out


def dense_embedding(ids: Tensor, weight: DenseWeight, dtype: torch.dtype, first: int | None = None) -> Tensor:
    """See `octavo_kernels.dense_embedding`."""
    library = get_library()
    if library is None or dtype not in DTYPES or len(weight.parts) != 1:
        return reference.dense_embedding(ids, weight, dtype, first)
    ids, part = as_contiguous(ids, torch.int64), weight.parts[0]
    out = torch.empty((ids.numel(), weight.width), dtype=dtype)
    op = library.pack(
        "dense_embedding",
        ids.data_ptr(),
        part.data.data_ptr(),
        out.data_ptr(),
        ids.numel(),
        part.channels,
        weight.width,
        WEIGHT_DTYPES[part.data.dtype],
        DTYPES[dtype],
        -1 if first is None else first,
    )
    library.run(op, threads_for(out.numel()))
    return out.view(*ids.shape, weight.width)
