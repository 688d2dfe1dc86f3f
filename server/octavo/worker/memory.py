"""The memory ledger: whether a model fits, how much the KV cache gets, and what to change when it does not fit."""

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
# On a CUDA device, for what profiling does not see: workspaces of libraries, kernels loaded later, fragmentation.
DEVICE_SLACK = 256 << 20
GRAPH_BYTES = 2 << 20  # that the driver takes for each captured graph


@dataclass(frozen=True)
class MemoryLedger:
    """How memory is shared out at start, in bytes. ``num_blocks`` counts the null block."""

    total: int  # that the engine may use
    weights: int
    kv_cache: int
    num_blocks: int
    block_bytes: int
    max_model_len: int
    block_size: int
    parts: tuple[tuple[str, int], ...] = ()  # what else is reserved on a device: (name, bytes)

    def lines(self) -> list[str]:
        """One log line for each part."""
        tokens = (self.num_blocks - 1) * self.block_size
        rest = [("memory limit", self.total), ("weights", self.weights), *self.parts]
        return [
            *(f"{name:14} {size / MIB:10,.0f} MiB" for name, size in rest),
            f"{'KV cache':14} {self.kv_cache / MIB:10,.0f} MiB  {self.num_blocks - 1:,} blocks of {self.block_size} "
            f"tokens, {tokens:,} tokens: {tokens / self.max_model_len:.1f} sequences of {self.max_model_len:,}",
        ]


@dataclass(frozen=True)
class ModelMemory:
    """What a model takes on one device before it can serve anything."""

    model: str
    weights: int  # bytes
    parameters: int  # their number
    weight_dtype: str  # as they lie in memory: "bfloat16", "int8"
    specs: list[KVCacheSpec]  # of the layers' KV cache


@dataclass(frozen=True)
class Alternative:
    """The same model with another flag, and the memory it then takes, of ``available`` bytes."""

    flag: str
    memory: ModelMemory
    available: int


def available_for_weights(cache: CacheConfig, total: int, in_use: int = 0, on_device: bool = False) -> int:
    """Bytes that weights and a minimal KV cache may take of ``total``, of which others use ``in_use``."""
    share = int(total * cache.gpu_memory_utilization) if on_device else total
    return share - in_use - (DEVICE_SLACK if on_device else PROCESS_BYTES)


def fits(cache: CacheConfig, memory: ModelMemory, available: int) -> bool:
    """Whether ``available`` bytes hold the weights and the smallest KV cache: the null block and one more."""
    return memory.weights + 2 * cache.block_size * sum(spec.bytes_per_token() for spec in memory.specs) <= available


def check_weights_fit(
    cache: CacheConfig, memory: ModelMemory, available: int, total: int, where: str, alternatives: Iterable[Alternative]
) -> None:
    """Raises ConfigError when not even a minimal KV cache fits beside the weights, with the figures and the flags or
    the size of model that would fit. ``alternatives`` are tried only then."""
    if fits(cache, memory, available):
        return
    raise ConfigError(
        f"{memory.model} needs {gib(memory.weights)} for its weights ({memory.weight_dtype}) and a KV cache beside "
        f"them; of the {gib(total)} of {where}, {gib(max(available, 0))} are available"
        + _suggestions(cache, memory, available, alternatives)
    )


def _suggestions(cache: CacheConfig, memory: ModelMemory, available: int, alternatives: Iterable[Alternative]) -> str:
    """The end of a sentence that says why a model does not fit."""
    tried = list(alternatives)
    fitting = [f"{x.flag} ({gib(x.memory.weights)})" for x in tried if fits(cache, x.memory, x.available)]
    if fitting:
        return "; it fits with " + ", or with ".join(fitting)
    others = ", ".join(f"{gib(x.memory.weights)} with {x.flag}" for x in tried)
    sizes = [_size_that_fits(memory, available, "")]
    sizes += [_size_that_fits(x.memory, x.available, f" with {x.flag}") for x in tried]
    return (
        f" ({others}: too much as well)" if others else ""
    ) + f"; choose a --model of at most {', or '.join(sizes)}, or give it more memory"


def _size_that_fits(memory: ModelMemory, available: int, flag: str) -> str:
    billions = max(available, 0) / memory.weights * memory.parameters / 1e9
    return f"{billions:.2g} billion parameters in {memory.weight_dtype}{flag}"


def gib(size: int) -> str:
    """Bytes in GiB: "131.4 GiB", "0.25 GiB"."""
    return f"{size / GIB:,.1f} GiB" if size >= 10 * GIB else f"{size / GIB:.2f} GiB"


def out_of_memory(error: BaseException) -> str | None:
    """What to do about an allocation that failed, in one line; None for any other error."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = " ".join(str(error).split())
    if not kinds & {"OutOfMemoryError", "MemoryError"} and "can't allocate memory" not in text:
        return None
    return (
        f"out of memory ({text[:160]}): lower --max-num-batched-tokens or --max-num-seqs, shrink the KV cache with "
        "--gpu-memory-utilization or --kv-cache-memory-bytes, or choose a smaller --model"
    )


def plan_cpu_memory(
    cache: CacheConfig, specs: list[KVCacheSpec], weights: int, max_model_len: int, fit_max_model_len: bool
) -> MemoryLedger:
    """Size the KV cache of a CPU engine. Raises ConfigError when one sequence of ``max_model_len`` does not fit, unless
    ``fit_max_model_len`` lets it be lowered."""
    total = limits.memory_limit()
    room = min(int(total * CPU_KV_SHARE), CPU_KV_MAX, available_for_weights(cache, total) - weights)
    ledger = _plan(cache, specs, weights, max_model_len, fit_max_model_len, total, room, "")
    if weights + ledger.kv_cache > total and cache.num_gpu_blocks_override is None:
        raise ConfigError(
            f"weights ({gib(weights)}) and KV cache ({gib(ledger.kv_cache)}) are more than the {gib(total)} that this "
            "process may use; lower --kv-cache-memory-bytes to at most "
            f"{max(available_for_weights(cache, total) - weights, 0)}"
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
    """Size the KV cache of a device with memory of its own.

    All in bytes: ``in_use`` is what is used once the weights are loaded (weights, CUDA context, other processes),
    ``activations`` the peak of the largest step, ``graphs`` is reserved for captured steps, ``histories`` for the
    tokens of requests with penalties. The cache gets the rest of ``gpu_memory_utilization`` of the device. Raises
    ConfigError when that is too little, with the figure to change.
    """
    total = int(device_total * cache.gpu_memory_utilization)
    room = total - in_use - activations - graphs - histories - DEVICE_SLACK
    hint = (
        f"; of {device_total / MIB:,.0f} MiB, gpu_memory_utilization={cache.gpu_memory_utilization:g} leaves "
        f"{max(room, 0) / MIB:,.0f} MiB beside weights ({weights / MIB:,.0f} MiB), a step ({activations / MIB:,.0f} "
        f"MiB; lower max_num_batched_tokens or max_num_seqs), graphs ({graphs / MIB:,.0f} MiB; enforce_eager), token "
        f"histories ({histories / MIB:,.0f} MiB; lower max_num_seqs) and other uses "
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
    """``room``: bytes for the KV cache unless the configuration sets them; ``hint`` ends the error's sentence."""
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
            f'{fits} or less (or "auto"), or enlarge the cache: --kv-cache-memory-bytes {(needed + 1) * block_bytes}'
            + hint
        )
    return MemoryLedger(
        total=total, weights=weights, kv_cache=(usable + 1) * block_bytes, num_blocks=usable + 1,
        block_bytes=block_bytes, max_model_len=max_model_len, block_size=cache.block_size, parts=parts,
    )  # fmt: skip
