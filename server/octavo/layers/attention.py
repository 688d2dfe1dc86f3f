"""Attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

import octavo_kernels
from octavo.errors import ModelError
from octavo.interface.engine_config import ModelConfig
from octavo.interface.kv_cache_spec import KVCacheSpec
from octavo.layers.linear import ColumnParallelLinear, QKVParallelLinear, QKVRows, RowParallelLinear
from octavo.layers.norm import RMSNorm
from octavo.layers.parallel import TensorParallel
from octavo.layers.quantization.base import LinearBase
from octavo.layers.rotary import RotaryEmbedding
from octavo.layers.weights import WeightSlot, WeightSource, fill_tensor
from octavo_kernels import AttentionMetadata


@dataclass
class StepImages:
    """What images change of a step's T tokens."""

    rows: Tensor | None  # int64 [M]: the tokens that are placeholders; None: all T are taken for one
    embeds: Tensor | None  # [M, H], in their place; None: they are there, or on a stage of a pipeline before
    deep: tuple[Tensor, ...] = ()  # [M, H] each, added to what the first layers return (DeepStack)
    limit: Tensor | None = None  # int32 [T]: the last position that each token sees; None: its own
    positions: Tensor | None = None  # int64 [3, M]: of the placeholders in time, height and width (M-RoPE)
    cos_sin: Tensor | None = None  # float32 [T, size]: the turns of each token; None: they follow from its position
    order: Tensor | None = None  # int64 [T]: 0, 1, ..., with `cos_sin`

    def padded(self, rows: int) -> StepImages:
        """The same for a step with rows of padding, ``rows`` in all."""
        if self.limit is None or len(self.limit) == rows:
            return self
        return replace(self, limit=functional.pad(self.limit, (0, rows - len(self.limit))))


@dataclass
class ForwardContext:
    """What a step's forward pass needs beside its tokens; passed as an argument, never a global."""

    metadata: list[AttentionMetadata]  # of each group of layers that share a block table
    # Of each layer: [2, num_blocks, num_kv_heads, block_size, head_size], in the kernels' order.
    kv_caches: list[Tensor]
    images: StepImages | None = None  # None: the step has no token of any


class Attention(nn.Module):
    """Rotary embedding, cache write and attention of one layer, with this rank's heads.

    ``window`` is how many positions a token sees, itself included (None: all); ``chunked``: those from the last
    multiple of ``window`` on (Llama 4). ``q_norm`` and ``k_norm`` are applied to each head. ``scale``: of the scores,
    the usual one if None. ``softcap`` c: scores become c * tanh(score / c).
    ``sinks``: each head has one more score that takes part in the softmax and has no value (gpt-oss); the checkpoint
    holds them for all ranks of ``tp``. ``shares_kv_with``: the attention of the layer whose keys and values this
    one reads: it has queries alone, and writes nothing (Gemma 4).
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
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        tp: TensorParallel = TensorParallel(),
        shares_kv_with: Attention | None = None,
        chunked: bool = False,
    ) -> None:
        super().__init__()
        self.layer, self.num_heads, self.num_kv_heads, self.head_size = layer, num_heads, num_kv_heads, head_size
        self.scale = head_size**-0.5 if scale is None else scale
        self.window, self.chunked, self.softcap = window, chunked, softcap
        self.group = 0  # of layers that share a block table: its index, see `octavo.interface.kv_cache_layout`
        self.k_scale = self.v_scale = 1.0  # of an fp8 cache
        self.tp = tp
        values = torch.empty(num_heads, dtype=torch.float32) if sinks else None
        self.sinks = None if values is None else nn.Parameter(values, requires_grad=False)
        # Modules of other modules: a tuple keeps them from being registered here a second time.
        self._shared = (rotary, q_norm, k_norm, shares_kv_with)

    def forward(self, qkv: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """``qkv [T, (Hq + 2 Hkv) D]`` (of queries alone ``[T, Hq D]``), ``positions`` int64 ``[T]``: ``[T, Hq D]``."""
        rotary, q_norm, k_norm, owner = self._shared
        owner = owner or self
        images, cos_sin = ctx.images, rotary.cos_sin_cache if rotary else None
        if images is not None and images.cos_sin is not None:
            cos_sin, positions = images.cos_sin, cast(Tensor, images.order)
        kv_cache, metadata = ctx.kv_caches[owner.layer], ctx.metadata[owner.group]
        scales = (owner.k_scale, owner.v_scale) if kv_cache.dtype == torch.float8_e4m3fn else (1.0, 1.0)
        if owner is self:
            q = octavo_kernels.rope_and_cache(
                qkv,
                positions,
                cos_sin,
                kv_cache,
                metadata.slot_mapping,
                self.num_heads,
                self.num_kv_heads,
                self.head_size,
                q_norm.weight if q_norm else None,
                k_norm.weight if k_norm else None,
                q_norm.eps if q_norm else 1e-6,
                *scales,
            )
        else:
            q = self._queries(qkv, positions)
        out = octavo_kernels.paged_attention(
            q, kv_cache, metadata, self.scale, self.window, self.softcap, *scales, self.sinks,
            limit=images.limit if images is not None else None, chunked=self.chunked,
        )  # fmt: skip
        return out.view(qkv.shape[0], self.num_heads * self.head_size)

    def _queries(self, q: Tensor, positions: Tensor) -> Tensor:
        """What `rope_and_cache` makes of queries alone, ``[T, Hq, D]``, in place."""
        rotary, q_norm, *_ = self._shared
        if q_norm is not None:
            octavo_kernels.rms_norm_(q, q_norm.weight, q_norm.eps)
        if rotary is not None:
            octavo_kernels.rope_(q, positions, rotary.cos_sin_cache, self.num_heads, self.head_size)
        return q.view(-1, self.num_heads, self.head_size)

    @property
    def shares_kv_with(self) -> Attention | None:
        """The attention whose keys and values it reads; None: it has its own."""
        return self._shared[3]

    @property
    def has_cache(self) -> bool:
        """Whether it keeps keys and values of its own."""
        return self._shared[3] is None

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The sinks, and what a checkpoint knows of the range of keys and values, which only an fp8 cache needs."""
        for name in ("k_scale", "v_scale"):
            yield WeightSlot(0, name, None, partial(self._set_scale, name), optional=True)
        if self.sinks is not None:
            heads = slice(self.tp.rank * self.num_heads, (self.tp.rank + 1) * self.num_heads)
            shape = (self.num_heads * self.tp.size,)
            yield WeightSlot(0, "sinks", shape, lambda source: fill_tensor(cast(Tensor, self.sinks), source, heads))

    def _set_scale(self, name: str, source: WeightSource) -> None:
        scale = source.load(torch.float32).amax().item()  # of heads: the largest, for all of them
        if not scale > 0:
            raise ModelError(f"tensor {source.name!r} must be above 0; the file is damaged: fetch it again")
        setattr(self, name, scale)

    def kv_cache_spec(self, dtype: str) -> KVCacheSpec:
        """What this layer keeps of each token, in the model's ``dtype``."""
        return KVCacheSpec(self.num_kv_heads, self.head_size, dtype, window=self.window)


class SelfAttention(nn.Module):
    """Query, key and value projections, `Attention` and the output projection of one layer.

    ``rotary`` None: positions come with the embeddings. ``qk_norm``: an RMSNorm of each query and key head. ``rows``:
    how the checkpoint stores the projections. ``norm_offset``: of the norms, see `RMSNorm`. ``shares_kv_with``: see
    `Attention`; then there is `q_proj` instead of `qkv_proj`.
    """

    head_norm: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        tp: TensorParallel,
        rotary: RotaryEmbedding | None = None,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        window: int | None = None,
        chunked: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        norm_offset: float | None = None,
        rows: QKVRows = QKVRows(),
        shares_kv_with: Attention | None = None,
    ) -> None:
        super().__init__()
        hidden, heads, size = config.hidden_size, config.num_heads, config.head_size
        eps = config.hf_config.get("rms_norm_eps", 1e-6)
        self.rotary = rotary  # one module that all layers share
        local_heads = tp.divide(heads, "num_attention_heads")
        if shares_kv_with is None:
            self.qkv_proj = QKVParallelLinear(hidden, size, heads, config.num_kv_heads, qkv_bias, tp, rows)
            kv_heads = self.qkv_proj.num_kv_heads
        else:
            self.q_proj = ColumnParallelLinear(hidden, heads * size, qkv_bias, tp)
            kv_heads = shares_kv_with.num_kv_heads
        self.o_proj = RowParallelLinear(heads * size, hidden, out_bias, tp)
        self.q_norm = self.head_norm(size, eps, norm_offset) if qk_norm else None
        self.k_norm = self.head_norm(size, eps, norm_offset) if qk_norm and shares_kv_with is None else None
        norms = (self.q_norm, self.k_norm)
        self.attn = Attention(
            layer,
            local_heads,
            kv_heads,
            size,
            rotary,
            window,
            *norms,
            scale,
            softcap,
            sinks,
            tp,
            shares_kv_with,
            chunked,
        )

    @property
    def input_proj(self) -> LinearBase:
        """What makes queries, and keys and values where they are the layer's own."""
        return self.qkv_proj if self.attn.has_cache else self.q_proj

    def forward(self, x: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """What each head makes of ``x [T, H]``, ``[T, Hq D]``: ``o_proj`` is for the caller, who may want few rows."""
        attended: Tensor = self.attn(self.input_proj(x), positions, ctx)
        return attended
