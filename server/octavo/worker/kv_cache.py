"""The layout and dtype of the KV cache, and its memory."""

from __future__ import annotations

from dataclasses import replace

import torch

import octavo_kernels
from octavo.interface.engine_config import EngineConfig
from octavo.interface.kv_cache_spec import KVCacheSpec
from octavo.models.base import CausalLM


def kv_cache_specs(model: CausalLM, config: EngineConfig, device: torch.device) -> list[KVCacheSpec]:
    """One layer's keys and values each, in the dtype of ``config``'s cache."""
    kv_dtype = config.cache.kv_cache_dtype
    if kv_dtype == "auto" and model.is_quantized:
        kv_dtype = quantized_kv_dtype(config, device)
    elif kv_dtype == "auto" and config.model.weight_dtype == "float16":
        kv_dtype = "bfloat16"  # of 16 bits as the weights; it costs 5e-5 nats where float32 activations cost none
    specs = model.kv_cache_specs()
    return specs if kv_dtype == "auto" else [spec_in_dtype(spec, kv_dtype, device) for spec in specs]


def quantized_kv_dtype(config: EngineConfig, device: torch.device) -> str:
    """The KV cache's dtype beside quantised weights, unless one is asked for: int8 loses far less than the weights did
    and takes half the memory of bfloat16. The model's own dtype where the kernels have neither."""
    block_size, head_size = config.cache.block_size, config.model.head_size
    dtype = getattr(torch, config.model.dtype)
    for name in ("int8", "bfloat16"):
        if not octavo_kernels.attention_problem(device, block_size, dtype, getattr(torch, name), head_size):
            return name
    return config.model.dtype


def spec_in_dtype(spec: KVCacheSpec, kv_dtype: str, device: torch.device) -> KVCacheSpec:
    """``spec`` with keys and values in ``kv_dtype``."""
    scale_bytes = octavo_kernels.kv_scale_bytes(device, getattr(torch, kv_dtype), spec.head_size)
    return replace(spec, dtype=kv_dtype, scale_bytes=scale_bytes)


def allocate_kv_cache(spec: KVCacheSpec, num_blocks: int, block_size: int, device: torch.device) -> torch.Tensor:
    """One layer's cache. Only the null block is zeroed: memory of the host that no block uses is never touched."""
    kv_cache = torch.empty(spec.shape(num_blocks, block_size), dtype=getattr(torch, spec.dtype), device=device)
    kv_cache[:, 0].zero_()
    return kv_cache
