"""What a model takes of a device: from its sizes in numbers where its family is described so, which takes milliseconds,
else by building it without memory, which takes torch."""

from __future__ import annotations

from octavo.interface.engine_config import EngineConfig
from octavo.interface.ranks import ONE_STAGE, Stage
from octavo.memory.ledger import ModelMemory
from octavo.plan.held import cache_specs, count_parameters, memory_of, on_device_dtype
from octavo.plan.shapes import shapes_of
from octavo.plan.stored import stored_types


def measure(config: EngineConfig, ranks: int, stage: Stage = ONE_STAGE) -> ModelMemory:
    """See `octavo.memory.plan.Measure`. Raises ModelError and ConfigError."""
    found = measure_in_numbers(config, ranks) if stage == ONE_STAGE else None
    if found is None:
        from octavo.worker.model_memory import measure_built

        found = measure_built(config, ranks, stage)
    elif config.drafter is not None:
        found = found.with_drafter(measure(config.drafter, ranks))
    return found


def measure_in_numbers(config: EngineConfig, ranks: int) -> ModelMemory | None:
    """None: not possible for this family, or this way to store it."""
    if config.attention_backend not in ("auto", "cpu"):
        return None
    config = on_device_dtype(config)
    dealt_to = ranks * config.parallel.data_parallel_size if config.parallel.enable_expert_parallel else 1
    shapes = shapes_of(config.model, ranks, dealt_to)
    whole = shapes if ranks * dealt_to == 1 else shapes_of(config.model)
    if shapes is None or whole is None:
        return None
    parameters, is_described = count_parameters(whole), bool(config.model.hf_config.get("quantization_config"))
    stored = stored_types(config, ranks, parameters)
    try:
        return memory_of(config, shapes, stored, parameters, is_described) if stored is not None else None
    except KeyError:  # tensors have other names than here
        return None


def kv_bytes_per_token(config: EngineConfig, quantized: bool) -> int | None:
    """Of the KV cache that a model has on a CPU by default: all layers, each key and value counted once.

    ``quantized``: whether its weights are. None: not known without building it.
    """
    if config.model.is_encoder or (shapes := shapes_of(config.model)) is None:
        return None
    return sum(spec.bytes_per_token() for spec in cache_specs(on_device_dtype(config), shapes.specs, quantized))
