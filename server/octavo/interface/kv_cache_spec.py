"""The KV cache that one attention layer needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class KVCacheSpec:
    """One layer's keys and values. ``kind`` "mla": one latent of ``head_size`` elements stands for both."""

    num_kv_heads: int
    head_size: int
    dtype: str  # float32 | float16 | bfloat16 | int8 | float8_e4m3fn
    scale_bytes: int = 0  # beside the elements of each key and each value, in a dtype that has scales
    kind: str = "attention"  # attention | mla
    window: int | None = None  # positions that a token sees, itself included; None: all before it

    @property
    def parts(self) -> int:
        """Keys and values, or latents."""
        return 1 if self.kind == "mla" else 2

    def bytes_per_token(self) -> int:
        """Bytes of one token's key and value in this layer."""
        return self.parts * self.num_kv_heads * (self.head_size * DTYPE_BYTES[self.dtype] + self.scale_bytes)

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """Shape of a block's keys and values: [2 (mla: 1), num_kv_heads, block_size, head_size plus the scales'
        width]."""
        width = self.head_size + self.scale_bytes // DTYPE_BYTES[self.dtype]
        return (self.parts, self.num_kv_heads, block_size, width)


def latent_specs(specs: Sequence[KVCacheSpec], kv_dtype: str, is_quantized: bool, on_cpu: bool) -> list[KVCacheSpec]:
    """Specs of multi-head latent attention, whose cache has 16 or 32 bits, on a GPU those of the model. Raises
    ConfigError."""
    if kv_dtype == "auto":
        return [replace(spec, dtype="bfloat16") for spec in specs] if is_quantized and on_cpu else list(specs)
    known = ("float32", "bfloat16") if on_cpu else (specs[0].dtype,)
    if kv_dtype not in known:
        raise ConfigError(
            f"kv_cache_dtype={kv_dtype}: the cache of multi-head latent attention (DeepSeek) is {' or '.join(known)}; "
            "leave kv_cache_dtype at auto"
        )
    return [replace(spec, dtype=kv_dtype) for spec in specs]
