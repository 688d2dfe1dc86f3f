"""Layers of multi-token prediction, which a checkpoint has behind its own (DeepSeek V3, GLM-4.5): each guesses a token
more from a token and the hidden state before it.

As the DeepSeek V3 report describes it: both are normed, brought together by a projection, and go through one decoder
layer; a norm and the model's head, of which the checkpoint has copies there, make logits of what comes out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import octavo_kernels
from octavo.layers.attention import ForwardContext
from octavo.layers.decoder import Decoder, DecoderLayer
from octavo.layers.embedding import VocabParallelEmbedding
from octavo.layers.linear import ReplicatedLinear
from octavo.layers.parallel import TensorParallel
from octavo.models.deepseek import DeepseekV3ForCausalLM
from octavo.models.glm4_moe import Glm4MoeForCausalLM
from octavo.models.llama import LlamaForCausalLM
from octavo.models.state_reader import StateReader


class PredictionDecoder(Decoder):
    """Its one layer, and what makes the layer's input."""

    def __init__(
        self, embed_tokens: VocabParallelEmbedding, layers: list[DecoderLayer], norms: Sequence[nn.Module], size: int
    ) -> None:
        super().__init__(embed_tokens, layers, norms[0])  # type: ignore[arg-type]
        self.enorm, self.hnorm = norms[1:]
        self.eh_proj = ReplicatedLinear(2 * size, size, False, TensorParallel())

    def predict(self, input_ids: Tensor, before: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """See `octavo.models.state_reader.StateReader`."""
        tokens, states = self.enorm(self.embed_tokens(input_ids))[0], self.hnorm(before)[0]
        x, residual = self.layers[0](self.eh_proj(torch.cat([tokens, states], dim=-1)), None, positions, ctx)
        return x if residual is None else octavo_kernels.add(residual, x)


class PredictionModel(StateReader, LlamaForCausalLM):
    """A family's layer behind its last one, as a model of one layer."""

    model: PredictionDecoder

    def create_decoder(
        self, embed_tokens: VocabParallelEmbedding, layers: list[DecoderLayer], embedding_scale: float
    ) -> Decoder:
        """See `LlamaForCausalLM`."""
        norms = [self.create_norm() for _ in range(3)]
        return PredictionDecoder(embed_tokens, layers, norms, self.config.hidden_size)

    def predict(self, input_ids: Tensor, before: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """See `StateReader`."""
        return self.model.predict(input_ids, before, positions, ctx)

    def guess(self, state: Tensor, number: int) -> Tensor:
        """See `StateReader`."""
        assert self.model.norm is not None
        return self.compute_logits(self.model.norm(state)[0])


class DeepSeekMTPModel(PredictionModel, DeepseekV3ForCausalLM):
    """DeepSeek V3's."""


class Glm4MoeMTPModel(PredictionModel, Glm4MoeForCausalLM):
    """GLM-4.5's."""
