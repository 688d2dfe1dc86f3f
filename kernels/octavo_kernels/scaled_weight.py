"""Weights of 8 bits for products with activations of 8 bits (W8A8): int8, or e4m3 (FP8), on GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128  # columns with one scale, of weights in blocks and of the activations that they are multiplied with
HIGHEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # a row's, or group's, largest value becomes this number


@dataclass(frozen=True)
class ScaledWeight:
    """A weight ``[N, K]`` whose elements are ``values * scales``.

    ``values`` int8 or float8_e4m3fn [N, K], contiguous; ``scales`` float32 [1, N], or [ceil(K / 128), N] of e4m3 in
    blocks of 128 columns. Activations are quantised to the same type, a scale for each row or for each of those blocks.
    """

    values: Tensor
    scales: Tensor

    @property
    def blocks(self) -> int:
        """The scales of a channel."""
        return self.scales.shape[0]
