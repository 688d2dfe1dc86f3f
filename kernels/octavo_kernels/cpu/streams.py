"""Streams of hidden states, and gates of which only the largest count, on CPU."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from octavo_kernels import reference
from octavo_kernels.cpu.library import DTYPES, as_contiguous, get_library, threads_for


def concat(*parts: Tensor) -> Tensor:
    """See `octavo_kernels.concat`: as a sum of streams, each once and the others 0 times, an operation that can be
    recorded."""
    first, *others = parts
    for number, part in enumerate(others, 2):
        first = mix_streams(first, _identity(number), part)
    return first


@cache
def _identity(size: int) -> Tensor:
    return torch.from_numpy(np.eye(size, dtype=np.float32))  # not torch's own, which could not be recorded


def mix_streams(
    x: Tensor, constants: Tensor, y: Tensor | None = None, matrix: Tensor | None = None, given: Tensor | None = None
) -> Tensor:
    """See `octavo_kernels.mix_streams`."""
    library, dtype = get_library(), DTYPES.get(x.dtype)
    others = [t for t in (matrix, given) if t is not None]
    if library is None or dtype is None or any(t.dtype != torch.float32 for t in (constants, *others)):
        return reference.mix_streams(x, constants, y, matrix, given)
    x, constants = as_contiguous(x), as_contiguous(constants)
    y, matrix, given = (None if t is None else as_contiguous(t) for t in (y, matrix, given))
    made, streams = constants.shape
    width = (x.shape[1] + (0 if y is None else y.shape[1])) // streams
    first = x.shape[1] // width
    depth = 0 if given is None else given.shape[1]
    out = x.new_empty((x.shape[0], made * width))
    addresses = (0 if t is None else t.data_ptr() for t in (y, constants, matrix, given))
    op = library.pack(
        "mix_streams",
        x.data_ptr(),
        *addresses,
        out.data_ptr(),
        x.shape[0],
        first,
        streams - first,
        made,
        width,
        depth,
        dtype,
    )
    library.run(op, threads_for(out.numel() * streams))
    return out


def match_rms_(x: Tensor, like: Tensor, floor: float) -> None:
    """See `octavo_kernels.match_rms_`."""
    library, dtype = get_library(), DTYPES.get(x.dtype)
    if library is None or dtype is None or not x.is_contiguous() or like.stride(1) != 1 or like.dtype != x.dtype:
        return reference.match_rms_(x, like, floor)
    rows, width = like.shape
    op = library.pack(
        "match_rms", x.data_ptr(), like.data_ptr(), rows, x.shape[1] // width, width, like.stride(0), dtype, floor
    )
    library.run(op, threads_for(x.numel()))


def sparsify_(x: Tensor, factor: float) -> None:
    """See `octavo_kernels.sparsify_`."""
    library, dtype = get_library(), DTYPES.get(x.dtype)
    if library is None or dtype is None or x.stride(1) != 1:
        return reference.sparsify_(x, factor)
    op = library.pack("sparsify", x.data_ptr(), *x.shape, x.stride(0), dtype, factor)
    library.run(op, threads_for(x.numel()))
