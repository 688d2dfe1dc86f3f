"""A pair of matrices of a LoRA adapter."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.layers.weights import WeightSource


@dataclass
class Matrices:
    """A and B of one of the checkpoint's modules, unread: ``[R, K]`` and ``[N, R]``, or of an embedding ``[R, V]`` and
    ``[H, R]``."""

    module: str
    a: WeightSource
    b: WeightSource
    scaling: float
    of_embedding: bool = False
