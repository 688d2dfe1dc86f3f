"""The engine's ledger of a model on a device that need not be here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from octavo.errors import ConfigError
from octavo.interface.engine_config import EngineConfig
from octavo.interface.kv_cache_spec import DTYPE_BYTES
from octavo.worker.memory import (
    DeviceMemory,
    MemoryLedger,
    ModelMemory,
    check_fits,
    kv_cache_layout,
    plan_memory,
    plan_without_cache,
    with_token_budget,
)
from octavo.worker.step_estimate import graph_bytes, history_bytes, step_bytes

# What a model takes of one of ``ranks`` devices.
Measure = Callable[[EngineConfig, int], ModelMemory]


@dataclass(frozen=True)
class Plan:
    """A model on one device, or on one of several that share it: each of ``stages`` has a part of the layers, of which
    each of ``ranks`` has a part."""

    config: EngineConfig  # as the engine would have it in the end
    device: DeviceMemory  # a CPU's: of all ranks
    ranks: int
    memory: ModelMemory  # of one device
    kv_bytes_per_token: int  # of the whole model, each key and value counted once
    ledger: MemoryLedger | None  # None: it does not fit
    problem: str = ""  # why not
    stages: int = 1

    @property
    def num_devices(self) -> int:
        """Devices that one engine takes."""
        return self.ranks * self.stages

    @property
    def is_served(self) -> bool:
        """Whether the engine runs on so many devices today."""
        return self.num_devices == 1 or self.device.kind == "cpu"

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
    sizes = replace(config.parallel, tensor_parallel_size=ranks, pipeline_parallel_size=stages)
    config = replace(config, parallel=sizes)
    memory = _on_stage(config, measure, ranks, stages)
    whole = memory if ranks * stages == 1 else measure(config, 1)
    kv_bytes = sum(spec.bytes_per_token() for spec in whole.specs)
    config = replace(config, scheduler=with_token_budget(config.scheduler, device.kind))
    found = Plan(config, device, ranks, memory, kv_bytes, None, stages=stages)
    try:
        own = replace(device, total=device.total // found.num_devices) if device.kind == "cpu" else device
        longest = check_fits(config, memory, own)
        config = config.with_max_model_len(longest)
        memory = _on_stage(config, measure, ranks, stages)  # tables of the model are as long as that
        ledger = _ledger(config, memory, own)
    except ConfigError as error:
        return replace(found, problem=str(error))
    return replace(found, config=config.with_max_model_len(ledger.max_model_len), memory=memory, ledger=ledger)


def _check_float8(config: EngineConfig, device: DeviceMemory) -> None:
    """Raises ConfigError for what a GPU of before compute capability 8.9 is refused at start."""
    if device.kind == "cpu" or device.has_float8:
        return
    if config.cache.kv_cache_dtype == "float8_e4m3fn":
        raise ConfigError(
            "kv_cache_dtype: an fp8 cache needs a GPU of compute capability 8.9 or more; leave kv_cache_dtype at auto"
        )
    if config.model.quantization == "fp8" and not config.model.hf_config.get("quantization_config"):
        raise ConfigError("quantization fp8 needs a GPU of compute capability 8.9 or above; use int8 on this one")


def _on_stage(config: EngineConfig, measure: Measure, ranks: int, stages: int) -> ModelMemory:
    """What the first stage takes, which has no fewer layers than another one, and not the head."""
    model, hf = config.model, config.model.hf_config
    if stages == 1:
        return measure(config, ranks)
    if stages > model.num_layers:
        raise ConfigError(f"{model.num_layers} layers cannot be dealt to {stages} pipeline stages; give fewer")
    count = -(-model.num_layers // stages)
    layers: dict[str, Any] = {"num_hidden_layers": count}
    if isinstance(hf.get("layer_types"), list):
        layers["layer_types"] = hf["layer_types"][:count]
    part = measure(replace(config, model=replace(model, hf_config={**hf, **layers})), ranks)
    head = 0
    if config.device != "cpu" and not hf.get("tie_word_embeddings"):
        head = model.vocab_size * model.hidden_size * DTYPE_BYTES[model.dtype] // ranks
    return replace(part, weights=part.weights - head, parameters=measure(config, ranks).parameters)


def _ledger(config: EngineConfig, memory: ModelMemory, device: DeviceMemory) -> MemoryLedger:
    if config.model.is_encoder:
        return plan_without_cache(config.cache, memory.weights, config.model.max_model_len, device.total)
    layout = kv_cache_layout(memory.specs, config, device.steps_in_flight)
    if device.kind == "cpu":
        return replace(plan_memory(config, layout, memory.weights, device), drafter=memory.drafter)
    return plan_memory(
        config, layout, memory.weights, device, activations=step_bytes(config), graphs=graph_bytes(config),
        histories=history_bytes(config),
    )  # fmt: skip
