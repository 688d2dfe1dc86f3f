"""The memory ledger: whether a model fits, how much the KV cache gets, and what to change when it does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from octavo.core.kv_groups import KVCacheLayout, make_layout
from octavo.errors import ConfigError
from octavo.interface.engine_config import CacheConfig
from octavo.interface.kv_cache_spec import KVCacheSpec
from octavo.system import limits

MIB = 1 << 20
GIB = 1 << 30
# Of a CPU's memory limit, for prefixes of requests that have ended. The rest of a KV cache is touched only when running
# sequences need it, so a machine that does other things as well does not slowly lose all its memory to the cache.
PREFIX_CACHE_SHARE = 1 / 8
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
    layout: KVCacheLayout
    parts: tuple[tuple[str, int], ...] = ()  # what else is reserved: (name, bytes)
    prefix_cache_blocks: int | None = None  # see `octavo.core.block_pool.BlockPool`

    def lines(self, weights_by_kind: Mapping[str, int]) -> list[str]:
        """One log line for each part. ``weights_by_kind``: bytes, as `CausalLM.weight_bytes_by_kind` gives them."""
        size, usable = self.layout.block_size, self.num_blocks - 1
        tokens = usable * (-(-self.max_model_len // size) * size) // self.layout.most_blocks(self.max_model_len)
        kinds = ", ".join(f"{kind} {size / MIB:,.1f}" for kind, size in weights_by_kind.items())
        lines = [
            f"{'memory limit':14} {self.total / MIB:10,.0f} MiB",
            f"{'weights':14} {self.weights / MIB:10,.0f} MiB  {kinds}",
            *(f"{name:14} {size / MIB:10,.0f} MiB" for name, size in self.parts),
        ]
        if not self.kv_cache:
            return lines
        lines.append(
            f"{'KV cache':14} {self.kv_cache / MIB:10,.0f} MiB  {usable:,} blocks of {size} "
            f"tokens, {tokens:,} tokens: {tokens / self.max_model_len:.1f} sequences of {self.max_model_len:,}"
        )
        if any(group.window for group in self.layout.groups):
            lines.append(f"{'a block':14} {self.block_bytes / MIB:10,.2f} MiB  {self._groups()}")
        if self.prefix_cache_blocks is not None:
            most = self.prefix_cache_blocks * self.block_bytes
            lines.append(
                f"{'prefix cache':14} {most / MIB:10,.0f} MiB  of the KV cache, at most: prefixes of requests that "
                "have ended"
            )
        return lines

    def _groups(self) -> str:
        """Which layers keep what, and how much of a block they leave empty."""
        groups = self.layout.groups
        layers: Counter[int | None] = Counter()
        for group in groups:
            layers[group.window] += len(group.layers)
        kinds = [
            f"{count} {'keep every position' if window is None else f'a window of {window:,}'}"
            for window, count in layers.items()
        ]
        most = max(len(group.layers) for group in groups)
        return f"of up to {most} layers, of which {', '.join(kinds)}; {self.layout.padding:.1%} padding"

    def shortened(self, own_len: int, cache: CacheConfig) -> str | None:
        """One line for the log where ``max_model_len`` is below the model's ``own_len``: why, and what would help."""
        if self.max_model_len >= own_len:
            return None
        needed = self.layout.most_blocks(own_len) + 1
        if cache.num_gpu_blocks_override is not None:
            flag = f"--num-gpu-blocks-override {needed - 1}"
        elif cache.kv_cache_memory_bytes is not None:
            flag = f"--kv-cache-memory-bytes {needed * self.block_bytes}"
        else:
            flag = f"more memory, --gpu-memory-utilization above {cache.gpu_memory_utilization:g} or a smaller "
            flag += "--kv-cache-dtype"
        return (
            f"max_model_len is {self.max_model_len:,}, not the model's {own_len:,}: the KV cache of "
            f"{gib(self.kv_cache)} holds no longer sequence, {own_len:,} tokens need {gib(needed * self.block_bytes)}; "
            f"longer ones take {flag}"
        )


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
    return int(total * cache.gpu_memory_utilization) - in_use - (DEVICE_SLACK if on_device else PROCESS_BYTES)


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
    """Bytes in GiB: "131.4 GiB", "0.25 GiB", or in MiB: "60 MiB"."""
    if size < GIB / 10:
        return f"{size / MIB:,.0f} MiB"
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


def plan_without_cache(cache: CacheConfig, weights: int, max_model_len: int, total: int) -> MemoryLedger:
    """The ledger of an encoder, which has no KV cache, on a device with ``total`` bytes."""
    return MemoryLedger(
        total=total, weights=weights, kv_cache=0, num_blocks=1, block_bytes=0, max_model_len=max_model_len,
        layout=make_layout([], max_model_len, cache.block_size, 0, grouped=False),
        parts=(("left free", total - int(total * cache.gpu_memory_utilization)),),
    )  # fmt: skip


def plan_cpu_memory(
    cache: CacheConfig, layout: KVCacheLayout, weights: int, max_model_len: int, fit_max_model_len: bool
) -> MemoryLedger:
    """Size the KV cache of a CPU engine: what the weights and the process itself leave of ``gpu_memory_utilization`` of
    the memory that this process may use. Raises ConfigError when one sequence of ``max_model_len`` does not fit, unless
    ``fit_max_model_len`` lets it be lowered."""
    total = limits.memory_limit()
    room = available_for_weights(cache, total) - weights
    hint = (
        f"; of {gib(total)}, gpu_memory_utilization={cache.gpu_memory_utilization:g} leaves {gib(max(room, 0))} beside "
        f"weights ({gib(weights)}) and the process ({gib(PROCESS_BYTES)})"
    )
    parts = (("process", PROCESS_BYTES), ("left free", total - int(total * cache.gpu_memory_utilization)))
    ledger = _plan(cache, layout, weights, max_model_len, fit_max_model_len, total, room, hint, parts)
    if cache.kv_cache_memory_bytes is None and cache.num_gpu_blocks_override is None and cache.enable_prefix_caching:
        most = int(total * PREFIX_CACHE_SHARE) // ledger.block_bytes
        ledger = replace(ledger, prefix_cache_blocks=min(most, ledger.num_blocks - 1))
    if weights + ledger.kv_cache > total and cache.num_gpu_blocks_override is None:
        raise ConfigError(
            f"weights ({gib(weights)}) and KV cache ({gib(ledger.kv_cache)}) are more than the {gib(total)} that this "
            "process may use; lower --kv-cache-memory-bytes to at most "
            f"{max(available_for_weights(cache, total) - weights, 0)}"
        )
    return ledger


def plan_device_memory(
    cache: CacheConfig,
    layout: KVCacheLayout,
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
    return _plan(cache, layout, weights, max_model_len, fit_max_model_len, total, room, hint, parts)


def _plan(
    cache: CacheConfig,
    layout: KVCacheLayout,
    weights: int,
    max_model_len: int,
    fit_max_model_len: bool,
    total: int,
    room: int,
    hint: str,
    parts: tuple[tuple[str, int], ...] = (),
) -> MemoryLedger:
    """``room``: bytes for the KV cache unless the configuration sets them; ``hint`` ends the error's sentence."""
    block_bytes, needed = layout.block_bytes, layout.most_blocks(max_model_len)
    if cache.num_gpu_blocks_override is not None:
        usable = cache.num_gpu_blocks_override
    else:
        usable = (cache.kv_cache_memory_bytes or max(room, 0)) // block_bytes - 1
    longest = layout.longest(usable, max_model_len)
    if usable < needed and fit_max_model_len and longest > 0:
        max_model_len, needed = longest, layout.most_blocks(longest)
    if usable < needed:
        fits = f'set --max-model-len to {longest} or less (or "auto"), or ' if longest > 0 else ""
        raise ConfigError(
            f"one sequence of max_model_len={max_model_len} needs {needed} KV cache blocks "
            f"({gib(needed * block_bytes)}), there is room for {max(usable, 0)}; {fits}enlarge the cache: "
            f"--kv-cache-memory-bytes {(needed + 1) * block_bytes}{hint}"
        )
    return MemoryLedger(
        total=total, weights=weights, kv_cache=(usable + 1) * block_bytes, num_blocks=usable + 1,
        block_bytes=block_bytes, max_model_len=max_model_len, layout=layout, parts=parts,
    )  # fmt: skip
