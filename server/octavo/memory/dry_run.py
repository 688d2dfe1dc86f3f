"""The engine's ledger of a model on a device that need not be here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from octavo.errors import ConfigError
from octavo.interface.engine_config import EngineConfig
from octavo.interface.kv_cache_spec import DTYPE_BYTES
from octavo.interface.ranks import ONE_STAGE, Stage, split_layers
from octavo.memory.ledger import DeviceMemory, MemoryLedger, ModelMemory
from octavo.memory.plan import (
    check_fits,
    device_communication_bytes,
    kv_cache_layout,
    plan_memory,
    plan_without_cache,
    with_int8_kind,
    with_step_limits,
)
from octavo.memory.states import check_recurrent_on
from octavo.memory.steps import graph_bytes, history_bytes, step_bytes
from octavo.memory.too_long import TooLongError


class Measure(Protocol):
    """Measures a model's memory on one of ``ranks`` devices that share it, or ``stage`` of it."""

    def __call__(self, config: EngineConfig, ranks: int, stage: Stage = ONE_STAGE, /) -> ModelMemory:
        """Raises ModelError and ConfigError."""


@dataclass(frozen=True)
class Plan:
    """A model on one device, or on one of several that share it: each of ``stages`` has a part of the layers, of which
    each of ``ranks`` has a part. With several engines (``-dp``) figures are those of one, unless they say otherwise."""

    config: EngineConfig  # as the engine would have it in the end
    device: DeviceMemory  # a CPU's: of all ranks of all engines
    ranks: int
    memory: ModelMemory  # of one device
    kv_bytes_per_token: int  # of the whole model, each key and value counted once
    ledger: MemoryLedger | None  # None: it does not fit
    problem: str = ""  # why not
    longest: int = 0  # of a context that is too long: the longest one that fits
    stages: int = 1
    of_stages: tuple[ModelMemory, ...] = ()  # of a device of each; ``memory`` is that with room for the fewest blocks

    @property
    def num_engines(self) -> int:
        """Engines of one server, each with requests and a KV cache of its own."""
        return self.config.parallel.data_parallel_size

    @property
    def num_devices(self) -> int:
        """Devices that all engines take."""
        return self.ranks * self.stages * self.num_engines

    @property
    def parts_of_machine(self) -> int:
        """The number of parts into which the memory and the speed of ``device`` are divided: ranks on CPUs share the
        machine."""
        return self.num_devices if self.device.kind == "cpu" else 1

    @property
    def obstacle(self) -> str | None:
        """The obstacle to running on so many devices today; None: there is none."""
        deals_experts, several = self.config.parallel.enable_expert_parallel, self.ranks * self.stages > 1
        if self.device.kind == "cpu":
            if deals_experts and several and self.num_engines > 1:
                return "experts of several engines do not go with tensor or pipeline parallelism yet"
            return None
        kinds = {
            "pipeline": self.stages > 1,
            "expert": deals_experts and self.num_devices > 1,
            "data": self.num_engines > 1,
        }
        kind = next((kind for kind, is_asked in kinds.items() if is_asked), None)
        return f"{kind} parallelism is not there yet on GPUs" if kind else None

    @property
    def concurrency(self) -> float:
        """Sequences of max_model_len that the KV cache holds."""
        if self.ledger is None or not self.ledger.kv_cache:
            return 0.0
        return (self.ledger.num_blocks - 1) / self.ledger.layout.most_blocks(self.ledger.max_model_len)

    def sequences_of(self, num_tokens: int) -> int:
        """Sequences of ``num_tokens`` that the KV cache holds at the same time."""
        if self.ledger is None or not self.ledger.kv_cache:
            return 0
        return (self.ledger.num_blocks - 1) // self.ledger.layout.most_blocks(num_tokens)


def make_plan(config: EngineConfig, device: DeviceMemory, measure: Measure, ranks: int = 1, stages: int = 1) -> Plan:
    """The ledger that an engine of ``config`` on ``device``, or a rank of it, would print, or why it would not start.
    Ranks on a CPU share its memory. Raises ConfigError where the model cannot be shared so."""
    _check_float8(config, device)
    check_recurrent_on(config.model, device.kind)
    sizes = replace(config.parallel, tensor_parallel_size=ranks, pipeline_parallel_size=stages)
    config = with_int8_kind(replace(config, parallel=sizes), device.kind, device.has_matrix_units)
    if device.kind != "cpu":
        device = replace(device, communication=device_communication_bytes(config.parallel))
    memories = _of_stages(config, measure, ranks, stages)
    whole = memories[0] if ranks * stages == 1 else measure(config, 1)
    kv_bytes = sum(spec.bytes_per_token() for spec in whole.specs)
    config = with_step_limits(config, device.kind, device.has_matrix_units)
    largest = max(memories, key=lambda memory: memory.weights)
    found = Plan(config, device, ranks, largest, kv_bytes, None, stages=stages, of_stages=tuple(memories))
    try:
        return _filled(found, config, measure)
    except TooLongError as error:
        longest = longest_context(found, config, measure)
        return replace(found, problem=str(error.with_longest(longest)), longest=longest)
    except ConfigError as error:
        return replace(found, problem=str(error))


def _filled(plan: Plan, config: EngineConfig, measure: Measure) -> Plan:
    """``plan`` with its ledger. Raises ConfigError where there is none."""
    own = replace(plan.device, total=plan.device.total // plan.parts_of_machine)
    config = config.with_max_model_len(min(check_fits(config, memory, own) for memory in plan.of_stages))
    memories = _of_stages(config, measure, plan.ranks, plan.stages)  # tables of the model are as long as that
    ledgers = [_ledger(config, memory, own) for memory in memories]
    ledger, memory = min(zip(ledgers, memories, strict=True), key=lambda pair: pair[0].num_blocks)
    ledger = ledger.cut_to(*map(min, zip(*(one.limits() for one in ledgers), strict=True)))
    config = config.with_max_model_len(ledger.max_model_len)
    return replace(plan, config=config, memory=memory, ledger=ledger, of_stages=tuple(memories))


def longest_context(plan: Plan, config: EngineConfig, measure: Measure) -> int:
    """The largest max_model_len below ``config``'s with which an engine starts; 0 if there is none. A shorter length
    makes steps smaller, so that more fits than beside the steps of the requested length."""

    def starts(length: int) -> bool:
        one = replace(config, fit_max_model_len=False).with_max_model_len(length)
        try:
            _filled(replace(plan, of_stages=tuple(_of_stages(one, measure, plan.ranks, plan.stages))), one, measure)
        except ConfigError:
            return False
        return True

    try:
        fits = _filled(plan, replace(config, fit_max_model_len=True), measure)
    except ConfigError:
        return 0
    low, step = fits.config.scheduler.max_model_len, config.cache.block_size
    if not starts(low):
        return 0
    high = config.scheduler.max_model_len
    while low + step < high and starts(low + step):
        low, step = low + step, 2 * step
    high = min(high, low + step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if starts(middle) else (low, middle)
    return low


def _check_float8(config: EngineConfig, device: DeviceMemory) -> None:
    """Raises ConfigError for what a GPU of before compute capability 8.9 is refused at start."""
    if device.kind == "cpu" or device.has_float8:
        return
    if config.cache.kv_cache_dtype == "float8_e4m3fn":
        raise ConfigError(
            "kv_cache_dtype: an fp8 cache needs a GPU of compute capability 8.9 or more; leave kv_cache_dtype at auto"
        )
    if config.model.quantization == "fp8" and not config.model.text.quantization_config:
        raise ConfigError("quantization fp8 needs a GPU of compute capability 8.9 or above; use int8 on this one")


def _of_stages(config: EngineConfig, measure: Measure, ranks: int, stages: int) -> list[ModelMemory]:
    """The memory of a rank of each stage: measured with the engine's own division of layers where it runs stages, else
    estimated from numbers of layers."""
    if stages == 1:
        return [measure(config, ranks)]
    of_all = measure(config, ranks).parameters
    if config.device == "cpu":
        found = [measure(config, ranks, Stage(number, stages)) for number in range(stages)]
    else:
        found = _estimated(config, measure, ranks, stages)
    return [replace(memory, parameters=of_all) for memory in found]


def _estimated(config: EngineConfig, measure: Measure, ranks: int, stages: int) -> list[ModelMemory]:
    """Estimate from models of so many layers, less the parts that only other stages have: tables, the head, the
    tower."""
    model, hf = config.model, config.model.hf_config
    table = model.vocab_size * model.hidden_size * DTYPE_BYTES[model.dtype] // ranks
    of_count: dict[tuple[int, bool], ModelMemory] = {}
    found = []
    for number, part in enumerate(split_layers(model.num_layers, stages)):
        count, is_text = len(part), number > 0
        if (count, is_text) not in of_count:
            layers: dict[str, Any] = {"num_hidden_layers": count}
            if isinstance(hf.get("layer_types"), list):
                layers["layer_types"] = hf["layer_types"][:count]
            own = replace(model, hf_config={**hf, **layers}, language_model_only=model.language_model_only or is_text)
            of_count[count, is_text] = measure(replace(config, model=own), ranks)
        elsewhere = (number > 0) + (number < stages - 1)
        if model.text.tie_word_embeddings:  # one is both
            elsewhere = 1 if 0 < number < stages - 1 else 0
        whole, stage = of_count[count, is_text], Stage(number, stages)
        found.append(replace(whole, weights=whole.weights - elsewhere * table, stage=stage, num_layers=count))
    return found


def _ledger(config: EngineConfig, memory: ModelMemory, device: DeviceMemory) -> MemoryLedger:
    if config.model.is_encoder:
        return plan_without_cache(config.cache, memory.weights, config.model.max_model_len, device.total)
    layout = kv_cache_layout(memory.specs, config, device.steps_in_flight, state=memory.state)
    if device.kind == "cpu":
        ledger = plan_memory(config, layout, memory.weights, device, stage=memory.stage)
        return replace(ledger, drafter=memory.drafter)
    return plan_memory(
        config,
        layout,
        memory.weights,
        device,
        activations=step_bytes(config),
        graphs=graph_bytes(config),
        histories=history_bytes(config),
        stage=memory.stage,
    )
