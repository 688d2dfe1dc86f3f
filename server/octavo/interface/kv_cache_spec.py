"""What one attention layer needs from the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class KVCacheSpec:
    """One layer's keys and values."""

    num_kv_heads: int
    head_size: int
    dtype: str  # float32 | float16 | bfloat16 | int8 | float8_e4m3fn
    scale_bytes: int = 0  # beside the elements of each key and each value, in a dtype that has scales

    def bytes_per_token(self) -> int:
        """Bytes of one token's key and value in this layer."""
        return 2 * self.num_kv_heads * (self.head_size * DTYPE_BYTES[self.dtype] + self.scale_bytes)

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """Of a block's keys and values: [2, num_kv_heads, block_size, head_size and what scales need]."""
        width = self.head_size + self.scale_bytes // DTYPE_BYTES[self.dtype]
        return (2, self.num_kv_heads, block_size, width)
