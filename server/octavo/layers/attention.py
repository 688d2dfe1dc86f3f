"""Attention over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

import octavo_kernels
from octavo.interface.kv_cache_spec import KVCacheSpec
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import RotaryEmbedding
from octavo_kernels import AttentionMetadata


@dataclass
class ForwardContext:
    """What a step's forward pass needs beside its tokens; handed down explicitly."""

    metadata: AttentionMetadata
    kv_caches: list[
        Tensor
    ]  # of each layer: [2, num_blocks, num_kv_heads, block_size, head_size], in the kernels' order


class Attention(nn.Module):
    """Rotary embedding, cache write and attention of one layer, with this rank's heads.

    ``window`` is how many positions a token sees, itself included (None: all). ``q_norm`` and ``k_norm`` are applied to
    each head.
    """

    def __init__(
        self,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        rotary: RotaryEmbedding | None = None,
        window: int | None = None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.num_heads, self.num_kv_heads, self.head_size = layer, num_heads, num_kv_heads, head_size
        self.scale = head_size**-0.5
        self.window = window
        # The rotary table is the model's, the norms are the layer's: a tuple keeps them from being registered here.
        self._shared = (rotary, q_norm, k_norm)

    def forward(self, qkv: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """``qkv [T, (Hq + 2 Hkv) D]``, ``positions`` int64 ``[T]``; returns ``[T, Hq D]``."""
        rotary, q_norm, k_norm = self._shared
        kv_cache = ctx.kv_caches[self.layer]
        q = octavo_kernels.rope_and_cache(
            qkv,
            positions,
            rotary.cos_sin_cache if rotary else None,
            kv_cache,
            ctx.metadata.slot_mapping,
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            q_norm.weight if q_norm else None,
            k_norm.weight if k_norm else None,
            q_norm.eps if q_norm else 1e-6,
        )
        out = octavo_kernels.paged_attention(q, kv_cache, ctx.metadata, self.scale, self.window)
        return out.view(qkv.shape[0], self.num_heads * self.head_size)

    def kv_cache_spec(self, dtype: str) -> KVCacheSpec:
        return KVCacheSpec(self.num_kv_heads, self.head_size, dtype)
