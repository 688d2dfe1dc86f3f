"""The memory that a model takes on a device, known before anything is loaded."""

from __future__ import annotations

import torch

from octavo.interface.engine_config import EngineConfig
from octavo.interface.ranks import Stage
from octavo.layers.parallel import Replicas, TensorParallel
from octavo.loader.checkpoint import stored_weights
from octavo.loader.load_model import taken_weights
from octavo.loader.weight_bytes import model_without_memory, weight_size
from octavo.memory.ledger import ModelMemory, held_in
from octavo.models.base import CausalLM
from octavo.worker.device import choose_kernels, resolve_dtype
from octavo.worker.kv_cache import kv_cache_specs


def measure_built(config: EngineConfig, ranks: int, stage: Stage = Stage()) -> ModelMemory:
    """See `octavo.memory.plan.Measure`: by building the model, or a stage of it, without memory. Raises
    ModelError and ConfigError."""
    device = torch.device(config.device)
    config = resolve_dtype(config, device)
    if device.type == "cpu":
        choose_kernels(config, device)
    found = model_memory(config, device, ranks, stage)
    return found if config.drafter is None else found.with_drafter(measure_built(config.drafter, ranks))


def model_memory(config: EngineConfig, device: torch.device, ranks: int = 1, stage: Stage = Stage()) -> ModelMemory:
    """On one of ``ranks`` devices that share it, or ``stage`` of it. Raises ModelError and ConfigError as loading it
    would, but for what reading its tensors shows."""
    stored, dealt = stored_weights(config.model, config.load_format), config.parallel.enable_expert_parallel
    cores = config.parallel.data_parallel_size
    replicas = Replicas(0, cores) if dealt and cores > 1 else None
    tp = TensorParallel(0, ranks, stage=stage, expert_parallel=dealt, replicas=replicas)
    model = model_without_memory(config.model, device, tp, stored)
    if stored:
        taken_weights(model, stored, config.model)
    size = weight_size(model, stored, device)
    parameters = size.parameters
    if dealt and ranks * cores > 1:  # there are more experts than those here
        whole = model_without_memory(config.model, device, TensorParallel(stage=stage), stored)
        parameters = weight_size(whole, stored, device).parameters
    described = bool(config.model.hf_config.get("quantization_config"))
    rounded = device.type != "cpu" and config.model.quantization in ("int8", "fp8") and not described
    weight_dtype = held_in(config.model, model.is_quantized or rounded)
    specs = kv_cache_specs(model, config, device)
    num_layers = len(model.model.own_layers()) if stage.size > 1 and isinstance(model, CausalLM) else 0
    return ModelMemory(config.model.model, size.nbytes, parameters, weight_dtype, specs, 0, stage, num_layers)
