"""The memory ledger: whether a model fits, how much the KV cache may have, and what to change when it does not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.interface.engine_config import CacheConfig
from octavo.interface.kv_cache_spec import KVCacheSpec
from octavo.system import limits

MIB = 1 << 20
GIB = 1 << 30
CPU_KV_SHARE = 0.25  # of the memory limit
CPU_KV_MAX = 4 << 30  # bytes


PROCESS_BYTES = 256 << 20  # of a CPU engine beside weights and KV cache: libraries, a step's tensors

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


@dataclass(frozen=True)
class ModelNeeds:
    """What an engine needs of one device before it can serve anything. ``weights`` bytes, ``parameters`` numbers,
    ``kind`` how the weights lie in memory ("bfloat16", "int8"), ``specs`` of its layers' KV cache."""

    model: str
    weights: int
    parameters: int
    kind: str
    specs: list[KVCacheSpec]


@dataclass(frozen=True)
class Alternative:
    """Another way to start the same model: ``flag`` as on the command line, what it then needs, of ``room`` bytes."""

    flag: str
    needs: ModelNeeds
    room: int


def weights_room(cache: CacheConfig, total: int, in_use: int = 0, on_device: bool = False) -> int:
    """Bytes that weights and one block of KV cache may take of ``total``, where ``in_use`` are taken by others."""
    share = int(total * cache.gpu_memory_utilization) if on_device else total
    return share - in_use - (DEVICE_SLACK if on_device else PROCESS_BYTES)


def least_kv_bytes(cache: CacheConfig, specs: list[KVCacheSpec]) -> int:
    """Of the null block and one more."""
    return 2 * cache.block_size * sum(spec.bytes_per_token() for spec in specs)


def check_weights_fit(
    cache: CacheConfig, needs: ModelNeeds, room: int, total: int, where: str, alternatives: Iterable[Alternative]
) -> None:
    """Raises ConfigError when not even the smallest KV cache has a place beside the weights: with what is needed, what
    there is, and which flag or which size of model would do. ``alternatives`` are tried only then."""
    if needs.weights + least_kv_bytes(cache, needs.specs) <= room:
        return
    raise ConfigError(
        f"{needs.model} needs {gib(needs.weights)} for its weights ({needs.kind}) and a KV cache beside them; of the "
        f"{gib(total)} of {where}, {gib(max(room, 0))} are left for that{_way_out(cache, needs, room, alternatives)}"
    )


def _way_out(cache: CacheConfig, needs: ModelNeeds, room: int, alternatives: Iterable[Alternative]) -> str:
    """The end of a sentence that says why a model does not fit."""
    tried = list(alternatives)
    fitting = [x for x in tried if x.needs.weights + least_kv_bytes(cache, x.needs.specs) <= x.room]
    if fitting:
        return "; it fits with " + ", or with ".join(f"{x.flag} ({gib(x.needs.weights)})" for x in fitting)
    others = [f"{gib(x.needs.weights)} with {x.flag}" for x in tried]
    sizes = [_size_that_fits(needs, room, ""), *(_size_that_fits(x.needs, x.room, f" with {x.flag}") for x in tried)]
    return (
        f" ({', '.join(others)}: too much, too)" if others else ""
    ) + f"; choose a --model of at most {', or '.join(sizes)}, or give it more memory"


def _size_that_fits(needs: ModelNeeds, room: int, how: str) -> str:
    billions = max(room, 0) / needs.weights * needs.parameters / 1e9
    return f"{billions:.2g} billion parameters in {needs.kind}{how}"


def gib(size: int) -> str:
    """Bytes as people compare them with their machine's: "131.4 GiB", small ones with more digits."""
    return f"{size / GIB:,.1f} GiB" if size >= 10 * GIB else f"{size / GIB:.2f} GiB"


def out_of_memory(error: BaseException) -> str | None:
    """What to do about an allocation that failed, in one line; None for any other error."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = " ".join(str(error).split())
    if not kinds & {"OutOfMemoryError", "MemoryError"} and "can't allocate memory" not in text:
        return None
    return (
        f"out of memory ({text[:160]}): lower --max-num-batched-tokens or --max-num-seqs, give the KV cache less with "
        "--gpu-memory-utilization or --kv-cache-memory-bytes, or choose a smaller --model"
    )


def plan_cpu_memory(
    cache: CacheConfig, specs: list[KVCacheSpec], weights: int, max_model_len: int, fit_max_model_len: bool
) -> MemoryLedger:
    """Size the KV pool of a CPU engine. Raises ConfigError when one sequence of ``max_model_len`` would not fit,
    unless ``fit_max_model_len`` lets it be lowered to what does."""
    total = limits.memory_limit()
    room = min(int(total * CPU_KV_SHARE), CPU_KV_MAX, weights_room(cache, total) - weights)
    ledger = _plan(cache, specs, weights, max_model_len, fit_max_model_len, total, room, "")
    if weights + ledger.kv_cache > total and cache.num_gpu_blocks_override is None:
        raise ConfigError(
            f"weights ({gib(weights)}) and KV cache ({gib(ledger.kv_cache)}) are more than the {gib(total)} that this "
            f"process may use; lower --kv-cache-memory-bytes to at most {max(weights_room(cache, total) - weights, 0)}"
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
            f"({gib(needed * block_bytes)}), there is room for {max(usable, 0)}; set --max-model-len to "
            f'{fits} or less (or "auto"), or give the cache more: --kv-cache-memory-bytes {(needed + 1) * block_bytes}'
            + hint
        )
    return MemoryLedger(
        total=total, weights=weights, kv_cache=(usable + 1) * block_bytes, num_blocks=usable + 1,
        block_bytes=block_bytes, max_model_len=max_model_len, block_size=cache.block_size, parts=parts,
    )  # fmt: skip
