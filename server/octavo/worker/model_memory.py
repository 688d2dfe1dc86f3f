"""The memory that a model takes on a device, known before anything is loaded."""

from __future__ import annotations

import torch

from octavo.errors import ConfigError
from octavo.interface.engine_config import EngineConfig
from octavo.interface.quantizations import GPU_ONLINE
from octavo.interface.ranks import Stage
from octavo.layers.parallel import Replicas, TensorParallel
from octavo.layers.quantization.weight_format import FLOATS
from octavo.loader.checkpoint import stored_weights
from octavo.loader.described import described_weights
from octavo.loader.load_model import taken_weights
from octavo.loader.weight_bytes import model_without_memory, weight_size
from octavo.memory.ledger import ModelMemory, held_in
from octavo.models.base import CausalLM
from octavo.worker.device import choose_kernels, resolve_dtype
from octavo.worker.kv_cache import kv_cache_specs


def measure_built(config: EngineConfig, ranks: int, stage: Stage = Stage(), is_described: bool = False) -> ModelMemory:
    """See `octavo.memory.dry_run.Measure`: by building the model, or a stage of it, without memory. ``is_described``:
    weights that are not here are taken to be stored as config.json says. Raises ModelError and ConfigError."""
    device = torch.device(config.device)
    config = resolve_dtype(config, device)
    if device.type == "cpu":
        choose_kernels(config, device)
    elif config.cache.kv_cache_dtype == "int8":  # their kernels, which would say so, need not be installed
        raise ConfigError("kv_cache_dtype: an int8 cache is for CPUs; fp8 takes as little memory on a GPU")
    found = model_memory(config, device, ranks, stage, is_described)
    if config.drafter is None:
        return found
    return found.with_drafter(measure_built(config.drafter, 1, is_described=is_described))  # each rank has all of it


def model_memory(
    config: EngineConfig, device: torch.device, ranks: int = 1, stage: Stage = Stage(), is_described: bool = False
) -> ModelMemory:
    """Measure a model on one of ``ranks`` devices that share it, or ``stage`` of it. Raises ModelError and ConfigError
    as loading it would, but for what reading its tensors shows."""
    stored, dealt = stored_weights(config.model, config.load_format), config.parallel.enable_expert_parallel
    if is_described and config.load_format == "dummy":
        stored = described_weights(config.model)
    cores = config.parallel.data_parallel_size
    replicas = Replicas(0, cores) if dealt and cores > 1 else None
    tp = TensorParallel(0, ranks, stage=stage, expert_parallel=dealt, replicas=replicas)
    model = model_without_memory(config.model, device, tp, stored, measured=True)
    if stored:
        taken_weights(model, stored, config.model)
    size = weight_size(model, stored, device)
    parameters = size.parameters
    if dealt and ranks * cores > 1:  # there are more experts than those here
        whole = model_without_memory(config.model, device, TensorParallel(stage=stage), stored, measured=True)
        parameters = weight_size(whole, stored, device).parameters
    described = bool(config.model.text.quantization_config)
    rounded = device.type != "cpu" and config.model.quantization in GPU_ONLINE and not described
    weight_dtype = held_in(config.model, model.is_quantized or rounded)
    if described and any(source.qtype not in FLOATS for _, source in stored):
        weight_dtype = str(config.model.hf_config["quantization_config"].get("quant_method"))
    specs = kv_cache_specs(model, config, device)
    num_layers = len(model.model.own_layers()) if stage.size > 1 and isinstance(model, CausalLM) else 0
    sizes = size.nbytes, parameters, weight_dtype, specs
    return ModelMemory(config.model.model, *sizes, stage=stage, num_layers=num_layers, state=model.state_spec())
