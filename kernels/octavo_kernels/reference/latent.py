"""Multi-head latent attention, see `octavo_kernels.latent_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.attention_metadata import AttentionMetadata
from octavo_kernels.attention_options import AttentionOptions
from octavo_kernels.reference.attention import paged_attention, rotate, write_kv
from octavo_kernels.reference.elementwise import rms_norm


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x [T, heads, width]`` times each head's own ``weight [heads, width, channels]``: ``[T, heads, channels]``."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.einsum("thk,hkn->thn", x.to(wide), weight.to(wide)).to(x.dtype)


def latent_queries(
    q: Tensor,
    latent: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    key_weight: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> Tensor:
    """See `octavo_kernels.latent_queries`."""
    size, turned = norm_weight.numel(), cos_sin_cache.shape[1]
    table = cos_sin_cache[positions.clamp(0, cos_sin_cache.shape[0] - 1)]
    key = rotate(latent[:, None, size:], table)
    kept = torch.cat([rms_norm(latent[:, None, :size], norm_weight, eps), key], dim=-1)
    write_kv([kept], kv_cache, slot_mapping)
    absorbed = head_linear(q[..., :-turned], key_weight)
    return torch.cat([absorbed, rotate(q[..., -turned:], table)], dim=-1)


def latent_attention(
    queries: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float, value_weight: Tensor
) -> Tensor:
    """See `octavo_kernels.latent_attention`."""
    attended = paged_attention(queries, kv_cache.expand(2, -1, -1, -1, -1), metadata, AttentionOptions(scale))
    return head_linear(attended[..., : value_weight.shape[1]], value_weight)
