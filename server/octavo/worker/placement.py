"""Which device and which kernels an engine runs on. What does not go together is refused before weights are loaded."""

from __future__ import annotations

from dataclasses import replace

import torch

import octavo_kernels
from octavo.errors import ConfigError
from octavo.interface.engine_config import EngineConfig
from octavo.interface.kv_cache_spec import KVCacheSpec
from octavo.models.base import CausalLM
from octavo_kernels import reference

_FLAG = "attention_backend (or OCTAVO_KERNEL_BACKEND)"


def choose_device(device: str) -> torch.device:
    """ "auto": CUDA where there is one. Raises ConfigError when CUDA is asked for and not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for and torch sees no CUDA device; use device='cpu' or 'auto'")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def choose_kernels(config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError when the kernels that are asked for cannot run here, cannot serve ``device``, or refuse the
    model or the KV cache: each step would fail, or only the first of a certain kind."""
    try:
        octavo_kernels.select_backend(config.attention_backend)
        octavo_kernels.check_device(device)
    except (ValueError, octavo_kernels.BackendUnavailableError) as error:
        raise ConfigError(f"{_FLAG}: {error}; leave it at auto, or choose another device") from error
    dtype = config.model.dtype
    kv_dtype = config.cache.kv_cache_dtype
    wanted = (
        config.cache.block_size,
        getattr(torch, dtype),
        getattr(torch, dtype if kv_dtype == "auto" else kv_dtype),
        config.model.head_size,
    )
    problem = octavo_kernels.attention_problem(device, *wanted)
    if problem:
        name = octavo_kernels.backend_name(device)
        way_out = "leave kv_cache_dtype at auto"
        if not reference.attention_problem(*wanted):
            way_out = "attention_backend='reference' does (slow)"
        raise ConfigError(f"{problem}: the kernel backend {name!r} does not do this; {way_out}")


def kv_cache_specs(model: CausalLM, config: EngineConfig, device: torch.device) -> list[KVCacheSpec]:
    """What each layer keeps of a token, in the dtype of ``config``'s cache."""
    kv_dtype = config.cache.kv_cache_dtype
    if kv_dtype == "auto" and model.is_quantized:
        kv_dtype = quantized_kv_dtype(config, device)
    specs = model.kv_cache_specs()
    return specs if kv_dtype == "auto" else [spec_with(spec, kv_dtype, device) for spec in specs]


def quantized_kv_dtype(config: EngineConfig, device: torch.device) -> str:
    """The KV cache's dtype beside quantised weights, unless one is asked for: int8 loses far less than the weights did
    and takes half the memory of bfloat16; where kernels want the model's own they get that."""
    block_size, head_size = config.cache.block_size, config.model.head_size
    dtype = getattr(torch, config.model.dtype)
    for name in ("int8", "bfloat16"):
        if not octavo_kernels.attention_problem(device, block_size, dtype, getattr(torch, name), head_size):
            return name
    return config.model.dtype


def spec_with(spec: KVCacheSpec, kv_dtype: str, device: torch.device) -> KVCacheSpec:
    """A layer's needs with its keys and values in ``kv_dtype``."""
    scale_bytes = octavo_kernels.kv_scale_bytes(device, getattr(torch, kv_dtype), spec.head_size)
    return replace(spec, dtype=kv_dtype, scale_bytes=scale_bytes)
