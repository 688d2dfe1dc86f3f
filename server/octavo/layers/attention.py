"""Attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from octavo.layers.unregistered import set_unregistered
from octavo.layers.weights import WeightSlot, WeightSource, fill_tensor
from octavo_kernels import AttentionMetadata, AttentionOptions, LayerState, StateMetadata


@dataclass
class StepImages:
    """The images of a step, for its T tokens."""

    rows: Tensor | None  # int64 [M]: the tokens that are placeholders; None: all T are taken for one
    embeds: Tensor | None  # [M, H], in their place; None: they are there, or on a stage of a pipeline before
    deep: tuple[Tensor, ...] = ()  # [M, H] each, added to what the first layers return (DeepStack)
    limit: Tensor | None = None  # int32 [T]: the last position that each token sees; None: its own
    positions: Tensor | None = None  # int64 [3, M]: of the placeholders in time, height and width (M-RoPE)
    cos_sin: Tensor | None = None  # float32 [T, size]: the turns of each token; None: they follow from its position
    order: Tensor | None = None  # int64 [T]: 0, 1, ..., with `cos_sin`

    def padded(self, rows: int) -> StepImages:
        """The images of a step with rows of padding, ``rows`` in all."""
        if self.limit is None or len(self.limit) == rows:
            return self
        return replace(self, limit=functional.pad(self.limit, (0, rows - len(self.limit))))


@dataclass
class ForwardContext:
    """The inputs of a step's forward pass beside its tokens; passed as an argument, never a global."""

    metadata: list[AttentionMetadata]  # of each group of layers that share a block table
    # Cache of each layer: [2, num_blocks, num_kv_heads, block_size, head_size], in the kernels' order.
    kv_caches: list[Tensor]
    images: StepImages | None = None  # None: the step has no token of any
    states: Sequence[LayerState] = ()  # of each recurrent layer
    state_metadata: StateMetadata | None = None  # None: there are no such layers


class Attention(nn.Module):
    """Rotary embedding, cache write and attention of one layer, with this rank's heads.

    ``q_norm`` and ``k_norm`` are applied to each head. ``sinks``: the layer has those of `AttentionOptions`, which the
    checkpoint holds for all ranks of ``tp``. ``shares_kv_with``: the attention of the layer whose keys and values this
    one reads: it has queries alone, and writes nothing (Gemma 4).
    """

    rotary: RotaryEmbedding | None
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    shares_kv_with: Attention | None

    def __init__(
        self,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        options: AttentionOptions = AttentionOptions(),
        *,
        rotary: RotaryEmbedding | None = None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        sinks: bool = False,
        tp: TensorParallel = TensorParallel(),
        shares_kv_with: Attention | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.num_heads, self.num_kv_heads, self.head_size = layer, num_heads, num_kv_heads, head_size
        self.group = 0  # of layers that share a block table: its index, see `octavo.interface.kv_cache_layout`
        self.tp = tp
        values = torch.empty(num_heads, dtype=torch.float32) if sinks else None
        self.sinks = None if values is None else nn.Parameter(values, requires_grad=False)
        self.options = replace(options, sinks=self.sinks)
        self.fp8_options = self.options  # with the scales of an fp8 cache, which others have no use for
        set_unregistered(self, rotary=rotary, q_norm=q_norm, k_norm=k_norm, shares_kv_with=shares_kv_with)

    def forward(self, qkv: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """``qkv [T, (Hq + 2 Hkv) D]`` (of queries alone ``[T, Hq D]``), ``positions`` int64 ``[T]``: ``[T, Hq D]``."""
        owner = self.shares_kv_with or self
        images, cos_sin = ctx.images, self.rotary.cos_sin_cache if self.rotary else None
        if images is not None and images.cos_sin is not None:
            cos_sin, positions = images.cos_sin, cast(Tensor, images.order)
        kv_cache, metadata = ctx.kv_caches[owner.layer], ctx.metadata[owner.group]
        options = self.fp8_options if kv_cache.dtype == torch.float8_e4m3fn else self.options
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
                self.q_norm.weight if self.q_norm else None,
                self.k_norm.weight if self.k_norm else None,
                self.q_norm.eps if self.q_norm else 1e-6,
                options.k_scale,
                options.v_scale,
            )
        else:
            q = self._queries(qkv, positions)
        limit = images.limit if images is not None else None
        out = octavo_kernels.paged_attention(q, kv_cache, metadata, options, limit)
        return out.view(qkv.shape[0], self.num_heads * self.head_size)

    def _queries(self, q: Tensor, positions: Tensor) -> Tensor:
        """Norm and rotate queries alone in place, as `rope_and_cache` does its own; returns ``[T, Hq, D]``."""
        if self.q_norm is not None:
            octavo_kernels.rms_norm_(q, self.q_norm.weight, self.q_norm.eps)
        if self.rotary is not None:
            octavo_kernels.rope_(q, positions, self.rotary.cos_sin_cache, self.num_heads, self.head_size)
        return q.view(-1, self.num_heads, self.head_size)

    @property
    def has_cache(self) -> bool:
        """True if it keeps keys and values of its own."""
        return self.shares_kv_with is None

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The sinks, and the scales of keys and values that a checkpoint may have, which only an fp8 cache needs."""
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
        if name == "k_scale":
            self.fp8_options = replace(self.fp8_options, k_scale=scale)
        else:
            self.fp8_options = replace(self.fp8_options, v_scale=scale)

    def kv_cache_spec(self, dtype: str) -> KVCacheSpec:
        """The cache of this layer's keys and values, in the model's ``dtype``."""
        return KVCacheSpec(self.num_kv_heads, self.head_size, dtype, window=self.options.window)


class SelfAttention(nn.Module):
    """Query, key and value projections, `Attention` and the output projection of one layer.

    ``rotary`` None: positions come with the embeddings. ``qk_norm``: an RMSNorm of each query and key head. ``rows``:
    how the checkpoint stores the projections. ``norm_offset``: of the norms, see `RMSNorm`. ``sinks`` and
    ``shares_kv_with``: see `Attention`; with the latter there is `q_proj` instead of `qkv_proj`.
    """

    head_norm: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        tp: TensorParallel,
        rotary: RotaryEmbedding | None = None,
        options: AttentionOptions = AttentionOptions(),
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        sinks: bool = False,
        norm_offset: float | None = None,
        rows: QKVRows = QKVRows(),
        shares_kv_with: Attention | None = None,
    ) -> None:
        super().__init__()
        hidden, heads, size = config.hidden_size, config.num_heads, config.head_size
        eps = config.text.rms_norm_eps
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
        self.attn = Attention(
            layer,
            local_heads,
            kv_heads,
            size,
            options,
            rotary=rotary,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            sinks=sinks,
            tp=tp,
            shares_kv_with=shares_kv_with,
        )

    @property
    def input_proj(self) -> LinearBase:
        """The projection to queries, and to keys and values where they are the layer's own."""
        return self.qkv_proj if self.attn.has_cache else self.q_proj

    @property
    def input_projs(self) -> list[LinearBase]:
        """All that read the layer's input."""
        return [self.input_proj]

    def forward(self, x: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Attend with ``x [T, H]``; returns ``[T, Hq D]``: ``o_proj`` is left to the caller, who may want few rows."""
        attended: Tensor = self.attn(self.input_proj(x), positions, ctx)
        return attended
