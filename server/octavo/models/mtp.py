"""Layers of multi-token prediction, which a checkpoint has behind its own (DeepSeek V3, GLM-4.5, Qwen3.5): each guesses
a token more from a token and the hidden state before it.

As the DeepSeek V3 report describes it: both are normed, brought together by a projection, and go through one decoder
layer; a norm and the model's head, of which the checkpoint has copies there, make logits of what comes out. Where there
are several layers, each reads the states of the one before, and the token one place further on. Qwen3.5 has one layer
and no copies, and feeds back what is normed, as vLLM does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn

import octavo_kernels
from octavo.interface.engine_config import ModelConfig
from octavo.layers.attention import ForwardContext
from octavo.layers.decoder import Decoder, DecoderLayer
from octavo.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from octavo.layers.linear import ReplicatedLinear
from octavo.layers.parallel import TensorParallel
from octavo.models.base import CausalLM
from octavo.models.deepseek import DeepseekV3ForCausalLM
from octavo.models.eagle import OfTarget
from octavo.models.glm4_moe import Glm4MoeForCausalLM
from octavo.models.llama import LlamaForCausalLM
from octavo.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from octavo.models.state_reader import StateReader


class PredictionDecoder(Decoder):
    """The layers, and what makes the input of each and what its head reads."""

    def __init__(
        self,
        embed_tokens: VocabParallelEmbedding,
        layers: list[DecoderLayer],
        create_norm: Callable[[], nn.Module],
        size: int,
        more_heads: list[ParallelLMHead],
    ) -> None:
        """``more_heads``: of all layers but the first."""
        super().__init__(embed_tokens, layers, None)
        self.more_heads = nn.ModuleList(more_heads)
        self.enorm, self.hnorm, self.norms = (nn.ModuleList(create_norm() for _ in layers) for _ in range(3))
        self.eh_proj = nn.ModuleList(ReplicatedLinear(2 * size, size, False, TensorParallel()) for _ in layers)

    def predict(self, input_ids: Tensor, before: Tensor, positions: Tensor, ctx: ForwardContext, number: int) -> Tensor:
        """See `octavo.models.state_reader.StateReader`."""
        tokens, states = self.enorm[number](self.embed_tokens(input_ids))[0], self.hnorm[number](before)[0]
        x = self.eh_proj[number](octavo_kernels.concat(tokens, states))
        x, residual = self.layers[number](x, None, positions, ctx)
        return x if residual is None else octavo_kernels.add(residual, x)


class PredictionModel(StateReader, LlamaForCausalLM):
    """A family's layers behind its last one, as a model of these alone."""

    model: PredictionDecoder

    @property
    def num_reads(self) -> int:
        """See `StateReader`."""
        return self.config.num_layers

    def create_decoder(
        self, embed_tokens: VocabParallelEmbedding, layers: list[DecoderLayer], embedding_scale: float
    ) -> Decoder:
        """See `LlamaForCausalLM`."""
        size = self.config.hidden_size
        heads = [ParallelLMHead(self.config.vocab_size, size, self.tp) for _ in layers[1:]]
        return PredictionDecoder(embed_tokens, layers, self.create_norm, size, heads)

    def predict(
        self, input_ids: Tensor, before: Tensor, positions: Tensor, ctx: ForwardContext, number: int = 0
    ) -> Tensor:
        """See `StateReader`."""
        return self.model.predict(input_ids, before, positions, ctx, number)

    def head(self, number: int) -> ParallelLMHead:
        """See `StateReader`."""
        layer = self._layer(number)
        return cast(ParallelLMHead, self.model.more_heads[layer - 1]) if layer else self.lm_head

    def head_input(self, state: Tensor, number: int) -> Tensor:
        """See `StateReader`."""
        return cast(Tensor, self.model.norms[self._layer(number)](state)[0])

    def _layer(self, number: int) -> int:
        """The layer that makes guess ``number``; the last one makes all beyond their number, since its keys and values
        have no gap there."""
        return min(number, self.config.num_layers - 1)


class DeepSeekMTPModel(PredictionModel, DeepseekV3ForCausalLM):
    """DeepSeek V3's."""


class Glm4MoeMTPModel(PredictionModel, Glm4MoeForCausalLM):
    """GLM-4.5's."""


class Qwen3_5MTPModel(PredictionModel, Qwen3_5ForCausalLM):  # noqa: N801
    """Qwen3.5's."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        self.model.embed_tokens = OfTarget()  # type: ignore[assignment]
        self.lm_head = OfTarget()  # type: ignore[assignment]

    def attach(self, target: CausalLM) -> None:
        """Take the embedding and the head of ``target``."""
        self.model.embed_tokens, self.lm_head = target.model.embed_tokens, target.lm_head

    def predict(
        self, input_ids: Tensor, before: Tensor, positions: Tensor, ctx: ForwardContext, number: int = 0
    ) -> Tensor:
        """See `StateReader`."""
        return super().head_input(super().predict(input_ids, before, positions, ctx, number), number)

    def head_input(self, state: Tensor, number: int) -> Tensor:
        """See `StateReader`: what `predict` returns."""
        return state


class Qwen3_5MoeMTPModel(Qwen3_5MTPModel, Qwen3_5MoeForCausalLM):  # noqa: N801
    """Qwen3.5's with experts."""
