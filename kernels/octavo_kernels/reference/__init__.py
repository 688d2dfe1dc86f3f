"""Plain torch versions of every kernel: slow, short and obviously right. The other backends are tested against them."""

from __future__ import annotations

from octavo_kernels.reference.attention import copy_blocks, paged_attention, rope_and_cache
from octavo_kernels.reference.layers import fused_add_rms_norm, linear, rms_norm, silu_and_mul

__all__ = [
    "copy_blocks",
    "fused_add_rms_norm",
    "linear",
    "paged_attention",
    "rms_norm",
    "rope_and_cache",
    "silu_and_mul",
    "unavailable_reason",
]


def unavailable_reason() -> str | None:
    """Why this backend cannot run here: never."""
    return None
