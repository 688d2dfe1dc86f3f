"""Suggest flags with which a model fits, or with which more sequences do.

One list of flags: for what the engine refuses before loading, for its advice when memory runs out, and for `octavo
plan`. Each is tried by planning with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from octavo.errors import OctavoError
from octavo.interface.engine_config import EngineConfig
from octavo.interface.ranks import ONE_STAGE, Stage
from octavo.memory.dry_run import Measure, Plan, make_plan
from octavo.memory.ledger import DeviceMemory, ModelMemory, gib
from octavo.memory.plan import available_on, with_token_budget

MAX_UTILIZATION = 0.95  # of the memory; drivers, kernels loaded later and others on the machine take some
SHORT_MODEL_LEN = 8192  # below most models' limits
_MOST_RANKS = 64
_WORTH = 1.05  # a change that buys less is not told


@dataclass(frozen=True)
class Change:
    """A configuration that differs by one flag. ``value``: None: what the plan with it says."""

    flag: str
    value: str | None
    config: EngineConfig
    device: DeviceMemory


@dataclass(frozen=True)
class Suggestion:
    """A flag, and what it does in words."""

    flag: str
    value: str
    text: str
    weights: int = 0  # bytes, with it
    more_devices: bool = False  # it takes more than the one that was asked for

    def as_json(self) -> dict[str, str]:
        """The suggestion as scripts read it."""
        return {"flag": self.flag, "value": self.value, "text": self.text}


def suggestions(
    asked: EngineConfig, plan: Plan, measure: Measure, host: DeviceMemory | None = None
) -> list[Suggestion]:
    """Suggest changes that let more sequences fit or, if the plan does not fit, let it start. ``host``: a GPU's
    machine, if it may be used instead."""
    found: list[Suggestion] = []
    for change, other in _tried(asked, plan, measure, host):
        if plan.ledger is None and change.flag in {way.flag for way in found}:
            continue  # what costs least is enough
        value = change.value or _value(other)
        if (told := _told(f"{change.flag} {value}", plan, other)) is not None:
            found.append(Suggestion(change.flag, value, told, other.memory.weights))
    return found + ([] if plan.ledger is not None else list(_more_ranks(asked, plan, measure)))


def refusal(asked: EngineConfig, plan: Plan, measure: Measure, host: DeviceMemory | None = None) -> str:
    """Explain in one line why a plan does not fit, and what would, with the flags of `suggestions`."""
    measure = remembered(measure)
    found = suggestions(asked, plan, measure, host)
    ways = [f"{way.flag} {way.value} ({gib(way.weights)})" for way in found if not way.more_devices]
    more = "".join(f"; {way.text}" for way in found if way.more_devices)
    if ways:
        return f"{plan.problem}; it fits with {', or with '.join(ways)}{more}"
    others = [
        (f"{change.flag} {change.value}", other)
        for change, other in _tried(asked, plan, measure, host)
        if other.memory.weights < plan.memory.weights and change.flag != "--max-model-len"
    ]
    tried = ", ".join(f"{gib(other.memory.weights)} with {flag}" for flag, other in others)
    sizes = [_size_that_fits(plan, "")] + [_size_that_fits(other, f" with {flag}") for flag, other in others]
    return (
        plan.problem
        + (f" ({tried}: too much as well)" if tried else "")
        + f"; choose a --model of at most {', or '.join(sizes)}, or give it more memory{more}"
    )


def out_of_memory(error: BaseException, config: EngineConfig, kind: str) -> str | None:
    """Advise in one line on an allocation that failed on a ``kind`` of device; None for any other error."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = " ".join(str(error).split())
    if not kinds & {"OutOfMemoryError", "MemoryError"} and "can't allocate memory" not in text:
        return None
    device = DeviceMemory(kind, 0)
    ways = [*_smaller_steps(config, device), *_smaller_cache(config, device)]
    if config.model.files.format != "gguf":
        ways += _smaller_weights(config, device)
    flags = ", ".join(f"{way.flag} {way.value}" for way in ways)
    return f"out of memory ({text[:160]}): try {flags}{' or' if flags else ''} a smaller --model"


def _tried(
    asked: EngineConfig, plan: Plan, measure: Measure, host: DeviceMemory | None
) -> Iterator[tuple[Change, Plan]]:
    measure = remembered(measure)
    for change in _changes(asked, plan, host):
        try:
            yield change, make_plan(change.config, change.device, measure, plan.ranks, plan.stages)
        except OctavoError:  # not possible with this model or device
            continue


def _changes(asked: EngineConfig, plan: Plan, host: DeviceMemory | None) -> Iterator[Change]:
    """The changes possible on this device, cheapest first."""
    cache, device = asked.cache, plan.device
    if cache.gpu_memory_utilization < MAX_UTILIZATION and cache.kv_cache_memory_bytes is None:
        larger = _changed(asked, cache={"gpu_memory_utilization": MAX_UTILIZATION})
        yield Change("--gpu-memory-utilization", str(MAX_UTILIZATION), larger, device)
    if cache.kv_cache_memory_bytes is not None:
        room = available_on(device, cache) - plan.memory.weights if device.kind == "cpu" else None
        if room is None or room > 0:
            changed = _changed(asked, cache={"kv_cache_memory_bytes": room})
            yield Change("--kv-cache-memory-bytes", None if room is None else str(room), changed, device)
    if not asked.model.is_encoder:
        yield from _smaller_entries(asked, device)
    yield from _smaller_weights(asked, device)
    if plan.longest:
        yield Change("--max-model-len", str(plan.longest), _of_length(asked, plan.longest), device)
    length = asked.scheduler.max_model_len
    while length > SHORT_MODEL_LEN // 4:
        length = max(SHORT_MODEL_LEN // 4, 1 << (length - 1).bit_length() - 1)
        yield Change("--max-model-len", str(length), _of_length(asked, length), device)
        if length <= SHORT_MODEL_LEN:
            break
    if device.kind != "cpu":
        yield from _smaller_steps(asked, device)
        if host is not None:
            yield Change("--device", "cpu", replace(asked, device="cpu"), host)


def _of_length(asked: EngineConfig, length: int) -> EngineConfig:
    """The same with a fixed length, which is not lowered."""
    return replace(asked, fit_max_model_len=False).with_max_model_len(length)


def _smaller_entries(asked: EngineConfig, device: DeviceMemory) -> Iterator[Change]:
    """Suggest a smaller dtype for the KV cache."""
    name, own = ("int8", "int8") if device.kind == "cpu" else ("fp8", "float8_e4m3fn")
    if asked.cache.kv_cache_dtype not in ("int8", "float8_e4m3fn"):
        yield Change("--kv-cache-dtype", name, _changed(asked, cache={"kv_cache_dtype": own}), device)


def _smaller_weights(asked: EngineConfig, device: DeviceMemory) -> Iterator[Change]:
    model = asked.model
    if model.quantization is None and not model.text.quantization_config:
        yield Change("--quantization", "int8", _changed(asked, model={"quantization": "int8"}), device)
    if model.dtype == "float32" and model.weight_dtype is None:
        shorter = {"dtype": "bfloat16", "dtype_is_asked": True}
        yield Change("--dtype", "bfloat16", _changed(asked, model=shorter), device)


def _smaller_steps(asked: EngineConfig, device: DeviceMemory) -> Iterator[Change]:
    scheduler = with_token_budget(asked, device.kind, device.has_matrix_units)
    fewer, tokens = scheduler.max_num_seqs // 2, scheduler.max_num_batched_tokens // 2
    if fewer >= 8:
        changed = _changed(asked, scheduler={"max_num_seqs": fewer})
        yield Change("--max-num-seqs", str(fewer), changed, device)
    if tokens >= max(64, scheduler.max_num_seqs):
        changed = _changed(asked, scheduler={"max_num_batched_tokens": tokens})
        yield Change("--max-num-batched-tokens", str(tokens), changed, device)


def _smaller_cache(asked: EngineConfig, device: DeviceMemory) -> Iterator[Change]:
    """Suggest a smaller cache, which leaves more memory to everything else."""
    cache = asked.cache
    if (size := cache.kv_cache_memory_bytes) is not None:
        changed = _changed(asked, cache={"kv_cache_memory_bytes": size // 2})
        yield Change("--kv-cache-memory-bytes", str(size // 2), changed, device)
        return
    if (blocks := cache.num_gpu_blocks_override) is not None:
        changed = _changed(asked, cache={"num_gpu_blocks_override": blocks // 2})
        yield Change("--num-gpu-blocks-override", str(blocks // 2), changed, device)
        return
    share = round(cache.gpu_memory_utilization - 0.1, 3)
    if share >= 0.1:
        changed = _changed(asked, cache={"gpu_memory_utilization": share})
        yield Change("--gpu-memory-utilization", f"{share:g}", changed, device)


def _value(other: Plan) -> str:
    """The memory that is available, as a value of --kv-cache-memory-bytes."""
    return str(other.ledger.kv_cache if other.ledger is not None else 0)


def _told(flag: str, plan: Plan, other: Plan) -> str | None:
    if other.ledger is None:
        return None
    length = other.config.scheduler.max_model_len
    if plan.ledger is None:
        room = f", {other.concurrency:.1f} sequences of {length:,} tokens" if other.ledger.kv_cache else ""
        return f"{flag}: it starts; weights {gib(other.memory.weights)}{room}"
    if not plan.ledger.kv_cache:
        return None
    before, after = plan.sequences_of(length), other.sequences_of(length)
    if after < _WORTH * before or after == before:
        return None
    gain = f"{after / before:.1f}x" if before else "some"
    return f"{flag}: {after:,} sequences of {length:,} tokens instead of {before:,} ({gain})"


def _more_ranks(asked: EngineConfig, plan: Plan, measure: Measure) -> Iterator[Suggestion]:
    """The smallest number of devices that share the weights on which it would start."""
    if plan.device.kind == "cpu":
        return
    ranks = plan.ranks
    while (ranks := ranks * 2) <= _MOST_RANKS:
        try:
            other = make_plan(asked, plan.device, measure, ranks, plan.stages)
        except OctavoError:
            return
        if other.ledger is not None:
            text = f"--tensor-parallel-size {ranks}: it fits on {other.num_devices} such GPUs"
            yield Suggestion("--tensor-parallel-size", str(ranks), text, other.memory.weights, more_devices=True)
            return


def _size_that_fits(plan: Plan, flag: str) -> str:
    memory, available = plan.memory, available_on(plan.device, plan.config.cache)
    billions = max(available, 0) / memory.weights * memory.parameters / 1e9
    return f"{billions:.2g} billion parameters in {memory.weight_dtype}{flag}"


def remembered(measure: Measure) -> Measure:
    """``measure``, asked once for what does not differ to it: most changes leave the model as it is."""
    seen: list[tuple[Any, ModelMemory]] = []

    def ask(config: EngineConfig, ranks: int, stage: Stage = ONE_STAGE) -> ModelMemory:
        key = (config.model, config.device, config.cache.kv_cache_dtype, config.cache.block_size, ranks, stage)
        for known, memory in seen:
            if known == key:
                return memory
        seen.append((key, measure(config, ranks) if stage == ONE_STAGE else measure(config, ranks, stage)))
        return seen[-1][1]

    return ask


def _changed(config: EngineConfig, **parts: dict[str, Any]) -> EngineConfig:
    changed = {name: replace(getattr(config, name), **fields) for name, fields in parts.items()}
    return replace(config, **changed)
