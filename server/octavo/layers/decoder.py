"""The stack of decoder layers that every decoder-only family shares.

A layer's forward pass has two halves, cut behind attention: `DecoderLayer.attend` does all that reads or writes the KV
cache, `DecoderLayer.finish` computes the rest, each row from that row alone. Most tokens of a prompt are there for
their keys and values only, so that in the last layer just the rows whose hidden states are wanted go through the
second half. Runners call the two halves of the stack apart: they record or capture the first one for T tokens, the
second one for R rows.

A family whose blocks are wired differently (norms behind blocks, attention and MLP side by side) writes a
`DecoderLayer` of its own; one with other embeddings overrides `Decoder.embed`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar, cast

from torch import Tensor, nn

import octavo_kernels
from octavo.interface.ranks import Stage
from octavo.layers.attention import ForwardContext, SelfAttention
from octavo.layers.embedding import VocabParallelEmbedding
from octavo.layers.latent_attention import LatentSelfAttention
from octavo.layers.norm import LayerNorm, RMSNorm

# Tensors that the first half leaves for the second one, by row: ``[T, ...]`` each.
DeferredHidden = tuple[Tensor, ...]


class DecoderLayer(nn.Module):
    """Attention and an MLP. Between layers the hidden states are ``residual + x`` (``x`` if residual is None), a sum
    that the next norm makes, so that one kernel can do both."""

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """Compute this layer's ``x`` and ``residual [T, H]`` from those of the layer before."""
        return self.finish(*self.attend(x, residual, positions, ctx))

    @abstractmethod
    def attend(self, x: Tensor, residual: Tensor | None, positions: Tensor, ctx: ForwardContext) -> DeferredHidden:
        """The half that ends with attention; ``positions`` int64 ``[T]``."""

    @abstractmethod
    def finish(self, *deferred: Tensor) -> tuple[Tensor, Tensor | None]:
        """``x`` and ``residual [R, H]`` from any R rows of what `attend` returned."""


class PreNormDecoderLayer(DecoderLayer):
    """Norms before attention and before the MLP, as in GPT-2 and Llama.

    ``attention_output_norm`` and ``mlp_output_norm`` are further ones of what attention and MLP add to the residual,
    which is multiplied by ``residual_scale``.
    """

    def __init__(
        self,
        input_layernorm: RMSNorm | LayerNorm,
        self_attn: SelfAttention | LatentSelfAttention,
        post_attention_layernorm: RMSNorm | LayerNorm,
        mlp: nn.Module,
        *,
        attention_output_norm: RMSNorm | None = None,
        mlp_output_norm: RMSNorm | None = None,
        residual_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp
        self.attention_output_norm, self.mlp_output_norm = attention_output_norm, mlp_output_norm
        self.residual_scale = residual_scale

    def attend(self, x: Tensor, residual: Tensor | None, positions: Tensor, ctx: ForwardContext) -> DeferredHidden:
        """See `DecoderLayer`."""
        x, residual = self.input_layernorm(x, residual)
        return self.self_attn(x, positions, ctx), cast(Tensor, residual)

    def finish(self, *deferred: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `DecoderLayer`."""
        attended, residual = deferred
        x = self._output(self.self_attn.o_proj(attended), self.attention_output_norm)
        x, residual = self.post_attention_layernorm(x, residual)
        return self._output(self.mlp(x), self.mlp_output_norm), residual

    def _output(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        if norm is not None:
            x, _ = norm(x)
        return x if self.residual_scale == 1.0 else octavo_kernels.scale(x, self.residual_scale)


class ParallelDecoderLayer(DecoderLayer):
    """Attention and MLP side by side, as in GPT-J: both read the layer's input, by one norm or by one each."""

    def __init__(
        self,
        input_layernorm: RMSNorm | LayerNorm,
        self_attn: SelfAttention,
        mlp: nn.Module,
        mlp_layernorm: RMSNorm | LayerNorm | None = None,
    ) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn, self.mlp = input_layernorm, self_attn, mlp
        self.post_attention_layernorm = mlp_layernorm

    def attend(self, x: Tensor, residual: Tensor | None, positions: Tensor, ctx: ForwardContext) -> DeferredHidden:
        """See `DecoderLayer`."""
        normed, total = self.input_layernorm(x, residual)
        attended = self.self_attn(normed, positions, ctx)
        return (attended, total) if self.post_attention_layernorm is not None else (attended, total, normed)

    def finish(self, *deferred: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `DecoderLayer`."""
        attended, residual, *normed = deferred
        x = normed[0] if self.post_attention_layernorm is None else self.post_attention_layernorm(residual)[0]
        return octavo_kernels.add(self.self_attn.o_proj(attended), self.mlp(x)), residual


class Elsewhere(nn.Module):
    """Stands in the place of a module that another stage of the pipeline has."""


class Decoder(nn.Module):
    """Embedding, decoder layers and the final norm (None: there is none). Embeddings are multiplied by
    ``embedding_scale``.

    ``taps`` are numbers of layers, in order, whose inputs are wanted of all rows, as EAGLE-3's drafters read them; the
    number of layers itself means the last one's output.
    """

    # Modules behind the layers, which belong to the last stage of a pipeline; others come before them.
    behind_layers: ClassVar[tuple[str, ...]] = ("norm",)

    def __init__(
        self,
        embed_tokens: VocabParallelEmbedding,
        layers: Iterable[DecoderLayer],
        norm: RMSNorm | LayerNorm | None,
        embedding_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.embed_tokens, self.embedding_scale = embed_tokens, embedding_scale
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.taps: tuple[int, ...] = ()
        self.stage = Stage()
        self.is_cut = True  # within the last layer; else that one is computed of all rows

    def keep(self, stage: Stage, layers: range) -> None:
        """Keep what ``stage`` has, which are ``layers`` and maybe what comes before or behind them."""
        self.stage = stage
        for number in set(range(len(self.layers))).difference(layers):
            self.layers[number] = Elsewhere()
        for name, _ in list(self.named_children()):
            if name != "layers" and not (stage.is_last if name in self.behind_layers else stage.is_first):
                setattr(self, name, Elsewhere())

    def own_layers(self) -> list[DecoderLayer]:
        """The layers of this stage."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """The input of the first layer: ``[T, H]``."""
        x: Tensor = self.embed_tokens(input_ids)
        return x if self.embedding_scale == 1.0 else octavo_kernels.scale(x, self.embedding_scale)

    def token_tables(self) -> list[VocabParallelEmbedding]:
        """The tables with a row for each token."""
        return [self.embed_tokens]

    def begin(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext, *received: Tensor) -> DeferredHidden:
        """Everything up to the last layer's attention, and what `taps` ask for behind it, ``[T, H]`` each. The KV cache
        is complete for these tokens afterwards.

        ``received``: what the stage before this one has returned for them. A stage that is not the last returns what
        its last layer does: ``x``, and ``residual`` where there is one."""
        x, residual = self._received(*received) if received else (self.embed(input_ids, positions), None)
        images = ctx.images
        if images is not None and images.embeds is not None:
            x = x.index_copy(0, cast(Tensor, images.rows), images.embeds)
        layers, last = self.own_layers(), None
        if self.stage.is_last and self.is_cut:
            last = layers.pop()
        tapped = []
        for number, layer in enumerate(layers):
            if number in self.taps:
                tapped.append(_total(x, residual))
            x, residual = layer(x, residual, positions, ctx)
            if images is not None and number < len(images.deep):
                deep, rows = images.deep[number], images.rows
                x = octavo_kernels.add(x, deep) if rows is None else x.index_add(0, rows, deep)
        if last is None:
            return (x,) if residual is None else (x, residual)
        if len(layers) in self.taps:
            tapped.append(_total(x, residual))
        deferred = last.attend(x, residual, positions, ctx)
        if len(self.layers) in self.taps:
            tapped.append(_total(*last.finish(*deferred)))
        return (*deferred, *tapped)

    @staticmethod
    def _received(x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return x, residual

    def finish(self, *deferred: Tensor) -> Tensor:
        """Hidden states ``[R, H]`` from any R rows of what `begin` returned, but for what was tapped."""
        if self.is_cut:
            x, residual = cast(DecoderLayer, self.layers[-1]).finish(*deferred)
        else:
            x, residual = self._received(*deferred)
        return _total(x, residual) if self.norm is None else cast(Tensor, self.norm(x, residual)[0])


def _total(x: Tensor, residual: Tensor | None) -> Tensor:
    return x if residual is None else octavo_kernels.add(residual, x)
