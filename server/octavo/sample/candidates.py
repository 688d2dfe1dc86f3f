"""A row's best tokens without sorting the row (CPU): numpy and block maxima are vectorised, torch's topk is not."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LOWEST = float(np.finfo(np.float32).min)  # a floor that leaves only -inf out


def block_floor(scores: Tensor, size: int) -> Tensor:
    """[N]: values that about ``size`` tokens of each row (float32 [N, V], CPU) or more reach: the ``size``-th best of
    the maxima of blocks, which is much cheaper than the ``size``-th best token. -inf tokens never count."""
    n, vocab = scores.shape
    width = vocab // (size * 6)
    if width < 2:
        return torch.full((n,), LOWEST)
    whole = vocab - vocab % width
    maxima = scores[:, :whole].view(n, -1, width).amax(-1).numpy()
    if whole < vocab:
        maxima = np.concatenate((maxima, scores[:, whole:].amax(-1, keepdim=True).numpy()), 1)
    return torch.from_numpy(np.maximum(np.partition(maxima, -size, axis=-1)[:, -size], LOWEST))


def candidates(scores: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's tokens at or above its ``floor`` (float32 [N]), by ascending id: values [N, C] (padded with -inf) and
    ids int64 [N, C]."""
    source = scores.numpy()
    rows, ids = np.divmod(np.flatnonzero(source >= floor.numpy()[:, None]), scores.shape[1])
    counts = np.bincount(rows, minlength=len(source))
    column = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = len(source), max(1, int(counts.max()))
    values = np.full(shape, -np.inf, dtype=np.float32)
    values[rows, column] = source[rows, ids]
    padded_ids: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
    padded_ids[rows, column] = ids
    return torch.from_numpy(values), torch.from_numpy(padded_ids)
