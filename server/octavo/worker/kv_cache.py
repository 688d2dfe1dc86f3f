"""The layout and dtype of the KV cache, and its memory."""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import octavo_kernels
from octavo.interface.engine_config import EngineConfig
from octavo.interface.kv_cache_layout import KVCacheLayout
from octavo.interface.kv_cache_spec import KVCacheSpec, latent_specs
from octavo.models.base import Model
from octavo.worker.sequence_states import allocate_states
from octavo_kernels import LayerState


def kv_cache_specs(model: Model, config: EngineConfig, device: torch.device) -> list[KVCacheSpec]:
    """One layer's keys and values each, in the dtype of ``config``'s cache."""
    specs, kv_dtype = model.kv_cache_specs(), config.cache.kv_cache_dtype
    if any(spec.kind == "mla" for spec in specs):
        return latent_specs(specs, kv_dtype, model.is_quantized, device.type == "cpu")
    if kv_dtype == "auto" and model.is_quantized:
        kv_dtype = quantized_kv_dtype(config, device)
    elif kv_dtype == "auto" and config.model.weight_dtype == "float16":
        kv_dtype = "bfloat16"  # of 16 bits as the weights; it costs 5e-5 nats where float32 activations cost none
    return specs if kv_dtype == "auto" else [spec_in_dtype(spec, kv_dtype, device) for spec in specs]


def quantized_kv_dtype(config: EngineConfig, device: torch.device) -> str:
    """The KV cache's dtype beside quantised weights, unless one is asked for: int8 loses far less than the weights did
    and takes half the memory of bfloat16. The model's own dtype where the kernels have neither."""
    block_size, sizes = config.cache.block_size, config.model.head_sizes
    dtype = getattr(torch, config.model.dtype)
    for name in ("int8", "bfloat16"):
        kept = getattr(torch, name)
        if not any(octavo_kernels.attention_problem(device, block_size, dtype, kept, size) for size in sizes):
            return name
    return config.model.dtype


def spec_in_dtype(spec: KVCacheSpec, kv_dtype: str, device: torch.device) -> KVCacheSpec:
    """``spec`` with keys and values in ``kv_dtype``."""
    scale_bytes = octavo_kernels.kv_scale_bytes(device, getattr(torch, kv_dtype), spec.head_size)
    return replace(spec, dtype=kv_dtype, scale_bytes=scale_bytes)


HUGE_PAGE = 2 << 20  # bytes


@dataclass(frozen=True)
class KVCache:
    """The blocks of all groups of layers. A block's part of a group's layers lies together, so that it is copied or
    moved in one piece. Groups have the same memory, and never the same block."""

    blocks: Tensor  # uint8 [num_blocks, bytes of a page]
    layers: list[Tensor]  # views: of each layer [2, num_blocks, num_kv_heads, block_size, head_size], in its dtype
    states: list[LayerState] = field(default_factory=list)  # of each recurrent layer, in the same blocks


def allocate_kv_cache(
    layout: KVCacheLayout, num_blocks: int, device: torch.device, max_num_seqs: int = 0, num_pending: int = 1
) -> KVCache:
    """Allocate the blocks. Only the null block is zeroed: memory of the host that no block uses is never touched.
    ``max_num_seqs`` and ``num_pending``: see `allocate_states`."""
    shape = (num_blocks, layout.block_bytes)
    blocks = _host_memory(shape) if device.type == "cpu" else torch.empty(shape, dtype=torch.uint8, device=device)
    blocks[0].zero_()
    layers: dict[int, Tensor] = {}
    for group in layout.groups:
        start = 0
        for layer in group.layers:
            spec = layout.specs[layer]
            part = blocks[:, start : (start := start + layout.block_size * spec.bytes_per_token())]
            halves = part.view(getattr(torch, spec.dtype)).unflatten(1, spec.block_shape(layout.block_size))
            layers[layer] = halves.transpose(0, 1)
    of_layers = [layers[layer] for layer in range(len(layout.specs))]
    return KVCache(blocks, of_layers, allocate_states(layout, blocks, max_num_seqs, num_pending))


def _host_memory(shape: tuple[int, int]) -> Tensor:
    """uint8, on huge pages where the system has them: attention reads a few kilobytes here and there, and with small
    pages looking up their addresses takes up to a tenth of its time."""
    length = shape[0] * shape[1]
    memory = mmap.mmap(-1, length + HUGE_PAGE)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory` alive
    return whole[-whole.data_ptr() % HUGE_PAGE :][:length].view(shape)
