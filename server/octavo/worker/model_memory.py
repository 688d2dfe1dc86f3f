"""The memory that a model takes on a device, and would take with other flags, known before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from octavo.errors import OctavoError
from octavo.interface.engine_config import EngineConfig
from octavo.loader.checkpoint import stored_weights
from octavo.loader.weight_bytes import model_without_memory, weight_size
from octavo.system import limits
from octavo.worker.kv_cache import kv_cache_specs
from octavo.worker.memory import Alternative, ModelMemory, available_for_weights, fits

SHORT_MODEL_LEN = 8192  # below most models' limits
MAX_UTILIZATION = 0.95  # of the memory; drivers, kernels loaded later and others on the machine take some


def model_memory(config: EngineConfig, device: torch.device) -> ModelMemory:
    """Raises ModelError and ConfigError as loading it would."""
    stored = stored_weights(config.model, config.load_format)
    model = model_without_memory(config.model, device, stored=stored)
    size = weight_size(model, stored)
    weight_dtype = "int8" if model.is_quantized else config.model.weight_dtype or config.model.dtype
    specs = kv_cache_specs(model, config, device)
    return ModelMemory(config.model.model, size.nbytes, size.parameters, weight_dtype, specs)


def alternatives(
    config: EngineConfig, device: torch.device, now: ModelMemory, total: int, in_use: int
) -> Iterator[Alternative]:
    """Flags with which the model, which takes ``now`` as configured, takes less memory or may use more. ``device`` has
    ``total`` bytes, of which others use ``in_use``."""
    on_device = device.type != "cpu"
    available = available_for_weights(config.cache, total, in_use, on_device)
    tried = []
    larger = replace(config.cache, gpu_memory_utilization=MAX_UTILIZATION)
    more = available_for_weights(larger, total, in_use, on_device)
    if fits(config.cache, now, more):
        yield Alternative(f"--gpu-memory-utilization {MAX_UTILIZATION}", now, more)
    if config.model.max_model_len > SHORT_MODEL_LEN:  # the rotary table is as long as that
        short = model_memory(replace(config, model=replace(config.model, max_model_len=SHORT_MODEL_LEN)), device)
        if fits(config.cache, short, available):
            yield Alternative(f"--max-model-len {SHORT_MODEL_LEN}", short, available)
    if device.type == "cpu" and now.weight_dtype != "int8":
        tried.append(("--quantization int8", _with(config, quantization="int8"), device, available))
    if now.weight_dtype == "float32":
        tried.append(("--dtype bfloat16", _with(config, dtype="bfloat16"), device, available))
    if on_device:
        host = torch.device("cpu")
        tried.append(("--device cpu", config, host, available_for_weights(config.cache, limits.memory_limit())))
    for flag, changed, target, space in tried:
        try:
            yield Alternative(flag, model_memory(changed, target), space)
        except OctavoError:  # not possible with this model or on this machine
            continue


def _with(config: EngineConfig, **changes: str) -> EngineConfig:
    return replace(config, model=replace(config.model, **changes))  # type: ignore[arg-type]
