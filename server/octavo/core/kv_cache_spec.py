"""What a layer needs from the KV cache. Layers with equal needs share a group, and a group shares block tables."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class KVCacheSpec:
    """One layer's keys and values. ``window`` is None where every position is seen."""

    num_kv_heads: int
    head_size: int
    dtype: str  # float32 | float16 | bfloat16
    window: int | None = None
    kind: str = "attention"

    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]
