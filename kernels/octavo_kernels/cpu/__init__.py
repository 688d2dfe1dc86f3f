"""The CPU backend."""

from __future__ import annotations

from octavo_kernels.reference import (
    copy_blocks,
    fused_add_rms_norm,
    linear,
    paged_attention,
    rms_norm,
    rope_and_cache,
    silu_and_mul,
    unavailable_reason,
)

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
