"""What a model needs of a device, and what it would need if it were started in another way. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from octavo.errors import OctavoError
from octavo.interface.engine_config import EngineConfig
from octavo.loader.weight_bytes import model_without_memory, stored_types, weight_size
from octavo.system import limits
from octavo.worker.memory import Alternative, ModelNeeds, least_kv_bytes, weights_room
from octavo.worker.placement import kv_cache_specs

SHORTER = 8192  # than most models' limits
MOST_UTILIZATION = 0.95  # of a device's memory; the driver and kernels loaded later take some


def model_needs(config: EngineConfig, device: torch.device) -> ModelNeeds:
    """Raises ModelError and ConfigError as loading it would."""
    model = model_without_memory(config.model, device)
    size = weight_size(model, stored_types(config.model, config.load_format))
    kind = "int8" if model.is_quantized else config.model.dtype
    return ModelNeeds(config.model.model, size.nbytes, size.parameters, kind, kv_cache_specs(model, config, device))


def alternatives(
    config: EngineConfig, device: torch.device, now: ModelNeeds, total: int, in_use: int
) -> Iterator[Alternative]:
    """Ways to start the model that needs ``now``, with less memory or with more of it; of the ``total`` bytes of
    ``device`` others have ``in_use``."""
    on_device = device.type != "cpu"
    room = weights_room(config.cache, total, in_use, on_device)
    tried = []
    more = weights_room(replace(config.cache, gpu_memory_utilization=MOST_UTILIZATION), total, in_use, on_device)
    if on_device and now.weights + least_kv_bytes(config.cache, now.specs) <= more:
        yield Alternative(f"--gpu-memory-utilization {MOST_UTILIZATION}", now, more)
    if config.model.max_model_len > SHORTER:  # the table of rotary angles is as long as that
        short = model_needs(replace(config, model=replace(config.model, max_model_len=SHORTER)), device)
        if short.weights + least_kv_bytes(config.cache, short.specs) <= room:
            yield Alternative(f"--max-model-len {SHORTER}", short, room)
    if device.type == "cpu" and now.kind != "int8":
        tried.append(("--quantization int8", _with(config, quantization="int8"), device, room))
    if now.kind == "float32":
        tried.append(("--dtype bfloat16", _with(config, dtype="bfloat16"), device, room))
    if on_device:
        host = torch.device("cpu")
        tried.append(("--device cpu", config, host, weights_room(config.cache, limits.memory_limit())))
    for flag, changed, where, there in tried:
        try:
            yield Alternative(flag, model_needs(changed, where), there)
        except OctavoError:  # not possible with this model or on this machine
            continue


def _with(config: EngineConfig, **changes: str) -> EngineConfig:
    return replace(config, model=replace(config.model, **changes))  # type: ignore[arg-type]
