"""The memory ledger: how much the KV cache may have, and what to change when that is too little."""

from __future__ import annotations

from dataclasses import dataclass

from octavo import platform
from octavo.config import CacheConfig
from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.errors import ConfigError

MIB = 1 << 20
CPU_KV_SHARE = 0.25  # of the memory limit
CPU_KV_MAX = 4 << 30  # bytes


@dataclass(frozen=True)
class MemoryLedger:
    """Bytes, as decided at start. ``num_blocks`` counts the null block."""

    total: int
    weights: int
    kv_cache: int
    num_blocks: int
    block_bytes: int
    max_model_len: int
    block_size: int

    def lines(self) -> list[str]:
        tokens = (self.num_blocks - 1) * self.block_size
        return [
            f"memory limit   {self.total / MIB:10,.0f} MiB",
            f"weights        {self.weights / MIB:10,.0f} MiB",
            f"KV cache       {self.kv_cache / MIB:10,.0f} MiB  {self.num_blocks - 1:,} blocks of {self.block_size} "
            f"tokens, {tokens:,} tokens: {tokens / self.max_model_len:.1f} sequences of {self.max_model_len:,}",
        ]


def plan_cpu_memory(
    cache: CacheConfig, specs: list[KVCacheSpec], weights: int, max_model_len: int, fit_max_model_len: bool
) -> MemoryLedger:
    """Size the KV pool of a CPU engine. Raises ConfigError when one sequence of ``max_model_len`` would not fit,
    unless ``fit_max_model_len`` lets it be lowered to what does."""
    total = platform.memory_limit()
    block_bytes = cache.block_size * sum(spec.bytes_per_token() for spec in specs)
    needed = -(-max_model_len // cache.block_size)
    if cache.num_gpu_blocks_override is not None:
        usable = cache.num_gpu_blocks_override
    else:
        pool = cache.kv_cache_memory_bytes or min(int(total * CPU_KV_SHARE), CPU_KV_MAX)
        usable = pool // block_bytes - 1
    if usable < needed and fit_max_model_len and usable > 0:
        max_model_len, needed = usable * cache.block_size, usable
    if usable < needed:
        fits = max(usable, 0) * cache.block_size
        raise ConfigError(
            f"one sequence of max_model_len={max_model_len} needs {needed} KV cache blocks "
            f"({needed * block_bytes / MIB:,.0f} MiB), there is room for {max(usable, 0)}; set max_model_len to "
            f'{fits} or less (or "auto"), or give the cache more: kv_cache_memory_bytes={(needed + 1) * block_bytes}'
        )
    if weights + (usable + 1) * block_bytes > total and cache.num_gpu_blocks_override is None:
        raise ConfigError(
            f"weights ({weights / MIB:,.0f} MiB) and KV cache ({(usable + 1) * block_bytes / MIB:,.0f} MiB) are more "
            f"than the {total / MIB:,.0f} MiB this process may use; lower kv_cache_memory_bytes to at most "
            f"{max(total - weights, 0) * 9 // 10} or choose a smaller dtype"
        )
    return MemoryLedger(
        total=total, weights=weights, kv_cache=(usable + 1) * block_bytes, num_blocks=usable + 1,
        block_bytes=block_bytes, max_model_len=max_model_len, block_size=cache.block_size,
    )  # fmt: skip
