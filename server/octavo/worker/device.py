"""Chooses the device and the kernels of an engine, and refuses what does not go together before weights are loaded."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

import octavo_kernels
from octavo.errors import ConfigError
from octavo.interface.engine_config import EngineConfig, ParallelConfig
from octavo.system.cuda_driver import FoundGPU, gpu_here
from octavo_kernels import gpu_parts, reference

logger = logging.getLogger(__name__)

_FLAG = "attention_backend (or OCTAVO_KERNEL_BACKEND)"
_LEAST_DRIVERS = {12: 525, 13: 580}  # by the major version of CUDA


def choose_device(device: str) -> torch.device:
    """ "auto": CUDA where there is one. Raises ConfigError when CUDA is asked for and not there, and for a GPU that
    torch should be able to use and cannot: a CPU in its place is slow, and nobody asked for it."""
    if device not in ("auto", "cuda"):
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda")
    found = gpu_here()
    if device == "auto" and (found is None or torch.version.cuda is None):
        if found is not None:
            logger.warning("device: %s is not used, because this torch is made without CUDA", found.name)
        return torch.device("cpu")
    if found is None:
        raise ConfigError("device 'cuda' was asked for and torch sees no CUDA device; use device='cpu' or 'auto'")
    raise ConfigError(f"device: {found.name} is here, and {_why_unusable(found)}; or give device='cpu'")


def _why_unusable(found: FoundGPU) -> str:
    """Explain why torch cannot use a GPU that its driver knows, and what to do."""
    made_for = torch.version.cuda
    if made_for is None:
        return "this torch is made without CUDA: install one that is made with it"
    needed = int(made_for.partition(".")[0])
    if found.cuda[0] < needed:
        newest, least = ".".join(map(str, found.cuda)), _LEAST_DRIVERS.get(needed)
        update = f"update it to {least} or newer" if least else "update it"
        return f"its driver runs CUDA up to {newest}, while torch needs {made_for}: {update}"
    try:
        torch.cuda.init()
        return "torch does not see it"
    except (RuntimeError, AssertionError) as error:
        return f"torch cannot use it: {error}"


def ranks_have_gpus(config: EngineConfig) -> bool:
    """True if each rank computes on a GPU of its own, and not on CPUs. Raises ConfigError where there are too few."""
    if choose_device(config.device).type != "cuda":
        return False
    check_ranks_on_gpus(config.parallel)
    ranks, count = config.parallel.world_size, torch.cuda.device_count()
    if ranks > count:
        raise ConfigError(
            f"tensor_parallel_size {ranks} needs a GPU for each rank, and {count} can be seen (CUDA_VISIBLE_DEVICES "
            f"decides): give at most {count}, or take the CPU (device cpu)"
        )
    return True


def check_ranks_on_gpus(parallel: ParallelConfig) -> None:
    """Raises ConfigError for what ranks on GPUs cannot do."""
    if parallel.distributed_executor_backend == "ray":
        raise ConfigError("distributed_executor_backend ray is not supported yet on GPUs: leave it out, or give mp")
    if parallel.enable_expert_parallel:
        raise ConfigError("enable_expert_parallel is not supported yet on GPUs: leave it out, and ranks cut experts")
    for which in ("pipeline_parallel_size", "data_parallel_size", "nnodes"):
        if getattr(parallel, which) > 1:
            raise ConfigError(f"{which} above 1 is not supported yet on GPUs: give 1, or take the CPU (device cpu)")


def resolve_dtype(config: EngineConfig, device: torch.device) -> EngineConfig:
    """``config`` with activations in a dtype that the kernels of ``device`` compute in: on a CPU float32 for float16,
    which loses nothing. Weights keep their 16 bits. Raises ConfigError for float16 of a model that overflows it."""
    model = config.model
    if device.type != "cpu" and model.dtype == "float16" and model.text.overflows_float16:
        if model.dtype_is_asked:
            raise ConfigError(
                f"dtype float16: hidden states of {model.model} are beyond its largest number; give bfloat16 or float32"
            )
        return replace(config, model=replace(model, dtype="float32"))
    if device.type != "cpu" or model.dtype != "float16":
        return config
    if model.dtype_is_asked:
        logger.info("float16 on a CPU: weights of 16 bits, activations in float32, which are faster and exact")
    return replace(config, model=replace(model, dtype="float32", weight_dtype="float16"))


def choose_kernels(config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError when the kernels that are asked for cannot run here, cannot serve ``device``, or refuse the
    model or the KV cache: each step would fail, or only the first of a certain kind."""
    try:
        off = gpu_parts.parts_off()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if off and device.type == "cuda":
        logger.warning("%s: turned off are %s", gpu_parts.ENV, ", ".join(sorted(off)))
    try:
        octavo_kernels.select_backend(config.attention_backend)
        octavo_kernels.check_device(device)
    except (ValueError, octavo_kernels.BackendUnavailableError) as error:
        raise ConfigError(f"{_FLAG}: {error}; leave it at auto, or choose another device") from error
    dtype = config.model.dtype
    kv_dtype = config.cache.kv_cache_dtype
    asked = config.cache.block_size, getattr(torch, dtype), getattr(torch, dtype if kv_dtype == "auto" else kv_dtype)
    for head_size in sorted(config.model.head_sizes):
        if problem := octavo_kernels.attention_problem(device, *asked, head_size):
            name = octavo_kernels.backend_name(device)
            way_out = "leave kv_cache_dtype at auto"
            if not reference.attention_problem(*asked, head_size):
                way_out = "attention_backend='reference' does (slow)"
            raise ConfigError(f"{problem}: the kernel backend {name!r} does not do this; {way_out}")
