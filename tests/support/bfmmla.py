"""The arithmetic of Arm's BFMMLA by numpy: products, sums of two and totals are rounded to odd, denormals are zeros.

After the architecture's definition (BFDotAdd, where FPCR.EBF is 0 as in every process that does not set it).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
LEAST = np.float64(np.finfo(np.float32).tiny)  # of what is no denormal
DROPPED = np.int64((1 << 29) - 1)  # bits of a float64's fraction that a float32 has not


def _to_odd(value: Doubles, error: Doubles) -> Floats:
    """float32 of value + error, of which ``value`` is the nearest float64: what is cut off sets the last bit.

    Denormal results are zeros of their sign; from 2^128 on they are infinities.
    """
    bits = value.view(np.int64)
    is_off = error != 0
    towards_zero = bits - (is_off & ((error < 0) == (value > 0)))
    is_cut = is_off | (towards_zero & DROPPED != 0)
    odd = ((towards_zero & ~DROPPED) | (is_cut * (DROPPED + 1))).view(np.float64)
    result = np.where(np.isfinite(value), odd, value)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.where(np.abs(result) < LEAST, np.copysign(0.0, result), result).astype(np.float32)


def _product(a: Floats, b: Floats) -> Floats:
    """Of bfloat16 values: exact in float64."""
    with np.errstate(invalid="ignore"):
        exact = a.astype(np.float64) * b
    return _to_odd(exact, np.zeros_like(exact))


def _sum(a: Floats, b: Floats) -> Floats:
    with np.errstate(invalid="ignore"):
        x, y = a.astype(np.float64), b.astype(np.float64)
        total = x + y
        part = total - x
        error = (x - (total - part)) + (y - part)
    return _to_odd(total, np.where(np.isfinite(error), error, 0.0))


def _columns(matrix: Tensor, width: int) -> Floats:
    """[width, rows] with denormals as zeros, padded with zeros."""
    values = matrix.float().numpy().T
    values = np.where(np.abs(values) < np.float32(LEAST), np.copysign(np.float32(0), values), values)
    return np.concatenate([values, np.zeros((width - len(values), values.shape[1]), np.float32)])


def linear_by_pairs(x: Tensor, weight: Tensor) -> Tensor:
    """float32 [rows, channels]: bfloat16 ``x`` [rows, width] times ``weight`` [channels, width], pair after pair."""
    width = -(-x.shape[1] // 4) * 4
    rows, channels = _columns(x, width)[:, :, None], _columns(weight, width)[:, None, :]
    total = np.zeros((len(x), len(weight)), np.float32)
    for k in range(0, width, 2):
        total = _sum(total, _sum(_product(rows[k], channels[k]), _product(rows[k + 1], channels[k + 1])))
    return torch.from_numpy(total)
