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


# Of a CUDA device, for what no profile sees: workspaces of libraries, kernels loaded later, fragmentation.
DEVICE_SLACK = 256 << 20
GRAPH_BYTES = 2 << 20  # of the driver, for each captured graph


@dataclass(frozen=True)
class MemoryLedger:
    """Bytes, as decided at start. ``num_blocks`` counts the null block."""

    total: int  # that this process may use
    weights: int
    kv_cache: int
    num_blocks: int
    block_bytes: int
    max_model_len: int
    block_size: int
    parts: tuple[tuple[str, int], ...] = ()  # what else was set aside on a device

    def lines(self) -> list[str]:
        tokens = (self.num_blocks - 1) * self.block_size
        rest = [("memory limit", self.total), ("weights", self.weights), *self.parts]
        return [
            *(f"{name:14} {size / MIB:10,.0f} MiB" for name, size in rest),
            f"{'KV cache':14} {self.kv_cache / MIB:10,.0f} MiB  {self.num_blocks - 1:,} blocks of {self.block_size} "
            f"tokens, {tokens:,} tokens: {tokens / self.max_model_len:.1f} sequences of {self.max_model_len:,}",
        ]


def plan_cpu_memory(
    cache: CacheConfig, specs: list[KVCacheSpec], weights: int, max_model_len: int, fit_max_model_len: bool
) -> MemoryLedger:
    """Size the KV pool of a CPU engine. Raises ConfigError when one sequence of ``max_model_len`` would not fit,
    unless ``fit_max_model_len`` lets it be lowered to what does."""
    total = platform.memory_limit()
    room = min(int(total * CPU_KV_SHARE), CPU_KV_MAX)
    ledger = _plan(cache, specs, weights, max_model_len, fit_max_model_len, total, room, "")
    if weights + ledger.kv_cache > total and cache.num_gpu_blocks_override is None:
        raise ConfigError(
            f"weights ({weights / MIB:,.0f} MiB) and KV cache ({ledger.kv_cache / MIB:,.0f} MiB) are more "
            f"than the {total / MIB:,.0f} MiB this process may use; lower kv_cache_memory_bytes to at most "
            f"{max(total - weights, 0) * 9 // 10} or choose a smaller dtype"
        )
    return ledger


def plan_device_memory(
    cache: CacheConfig,
    specs: list[KVCacheSpec],
    weights: int,
    max_model_len: int,
    fit_max_model_len: bool,
    *,
    device_total: int,
    in_use: int,
    activations: int,
    graphs: int,
    histories: int = 0,
) -> MemoryLedger:
    """Size the KV pool of a device with memory of its own.

    ``in_use`` is everything on the device once the weights are there (weights, CUDA context, other processes),
    ``activations`` the peak of the largest step, ``graphs`` what is set aside for captured steps, ``histories`` for the
    tokens of requests with penalties. The rest of ``gpu_memory_utilization`` of the device is the cache's. Raises
    ConfigError when that does not do, with the figure to change.
    """
    total = int(device_total * cache.gpu_memory_utilization)
    room = total - in_use - activations - graphs - histories - DEVICE_SLACK
    hint = (
        f"; of {device_total / MIB:,.0f} MiB, gpu_memory_utilization={cache.gpu_memory_utilization:g} leaves "
        f"{max(room, 0) / MIB:,.0f} MiB beside weights ({weights / MIB:,.0f} MiB), a step ({activations / MIB:,.0f} "
        f"MiB; lower max_num_batched_tokens or max_num_seqs), graphs ({graphs / MIB:,.0f} MiB; enforce_eager), token "
        f"histories ({histories / MIB:,.0f} MiB; lower max_num_seqs) and what else is in use "
        f"({max(in_use - weights, 0) / MIB:,.0f} MiB)"
    )
    parts = (
        ("others, context", max(in_use - weights, 0)),
        ("activations", activations),
        ("graphs", graphs),
        ("histories", histories),
        ("slack", DEVICE_SLACK),
    )
    return _plan(cache, specs, weights, max_model_len, fit_max_model_len, total, room, hint, parts)


def _plan(
    cache: CacheConfig,
    specs: list[KVCacheSpec],
    weights: int,
    max_model_len: int,
    fit_max_model_len: bool,
    total: int,
    room: int,
    hint: str,
    parts: tuple[tuple[str, int], ...] = (),
) -> MemoryLedger:
    """``room``: bytes for the KV pool unless the configuration gives a figure; ``hint`` ends the error's sentence."""
    block_bytes = cache.block_size * sum(spec.bytes_per_token() for spec in specs)
    needed = -(-max_model_len // cache.block_size)
    if cache.num_gpu_blocks_override is not None:
        usable = cache.num_gpu_blocks_override
    else:
        usable = (cache.kv_cache_memory_bytes or max(room, 0)) // block_bytes - 1
    if usable < needed and fit_max_model_len and usable > 0:
        max_model_len, needed = usable * cache.block_size, usable
    if usable < needed:
        fits = max(usable, 0) * cache.block_size
        raise ConfigError(
            f"one sequence of max_model_len={max_model_len} needs {needed} KV cache blocks "
            f"({needed * block_bytes / MIB:,.0f} MiB), there is room for {max(usable, 0)}; set max_model_len to "
            f'{fits} or less (or "auto"), or give the cache more: kv_cache_memory_bytes={(needed + 1) * block_bytes}'
            + hint
        )
    return MemoryLedger(
        total=total, weights=weights, kv_cache=(usable + 1) * block_bytes, num_blocks=usable + 1,
        block_bytes=block_bytes, max_model_len=max_model_len, block_size=cache.block_size, parts=parts,
    )  # fmt: skip
