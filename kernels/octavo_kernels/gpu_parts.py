"""Parts of the work on GPUs that can be turned off one by one, to find the one that fails on a machine."""

from __future__ import annotations

import os
from functools import cache

ENV = "OCTAVO_GPU_OFF"
# Each has a slower way that stands in for it.
PARTS = {
    "pdl": "kernels that start while the one before them ends",
    "small-linear": "the kernel for linear layers of at most 16 rows; cuBLAS multiplies",
    "prompt-graphs": "captured steps with prompts",
    "captured-sampler": "captured sampling",
    "exchange": "sums that ranks read from each other's memory; NCCL moves them",
}


@cache
def parts_off() -> frozenset[str]:
    """The words of the variable `ENV`, which is read once. Raises ValueError for unknown ones."""
    words = frozenset(word.strip() for word in os.environ.get(ENV, "").split(",")) - {""}
    if unknown := sorted(words - PARTS.keys()):
        raise ValueError(f"{ENV}: {unknown[0]!r} is not known; give words of {', '.join(PARTS)}")
    return words


def is_on(part: str) -> bool:
    """True unless `ENV` names ``part``, one of `PARTS`."""
    return part not in parts_off()
