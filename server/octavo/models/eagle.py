"""EAGLE's draft heads (Li et al., 2024 and 2025): a decoder layer, or a few, that guess a token from the one before it
and from what the model that they were trained for has computed up to there.

EAGLE-1 and 2 bring an embedding and the model's last hidden state together with a projection; their layer has no norm
at its input, and the model's own head makes logits of what comes out. EAGLE-3 projects the inputs of three of the
model's layers instead, once, and has its first layer's attention read the embedding and that state side by side; it has
a head of its own, often of the most frequent tokens alone. Both feed what comes out back for the next guess.
"""

from __future__ import annotations

from typing import ClassVar, cast

from torch import Tensor, nn

import octavo_kernels
from octavo.interface.engine_config import ModelConfig
from octavo.interface.model_config.eagle import Eagle3Config, Eagle3Qwen3Config, EagleConfig
from octavo.layers.attention import ForwardContext, SelfAttention
from octavo.layers.decoder import Decoder, DecoderLayer, DeferredHidden, PreNormDecoderLayer
from octavo.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from octavo.layers.linear import QKVParallelLinear, ReplicatedLinear
from octavo.layers.norm import RMSNorm
from octavo.layers.parallel import TensorParallel
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.base import CausalLM
from octavo.models.draft_vocabulary import DraftVocabulary
from octavo.models.llama import LlamaForCausalLM
from octavo.models.qwen3 import Qwen3ForCausalLM
from octavo.models.state_reader import StateReader


class NoNorm(nn.Module):
    """A placeholder for a norm that is absent."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``x`` twice, as a norm would return it and its residual."""
        assert residual is None
        return x, x


class OfTarget(nn.Module):
    """A placeholder for an embedding or a head that is the other model's."""

    tied_to = None


class EagleDecoder(Decoder):
    """The layers, and what makes their input."""

    def __init__(self, embed_tokens: VocabParallelEmbedding | OfTarget, layers: list[DecoderLayer], fc: nn.Module):
        super().__init__(cast(VocabParallelEmbedding, embed_tokens), layers, None)
        self.fc = fc

    def token_tables(self) -> list[VocabParallelEmbedding]:
        """See `Decoder`."""
        return [table for table in super().token_tables() if not isinstance(table, OfTarget)]

    def predict(self, input_ids: Tensor, before: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """See `octavo.models.state_reader.StateReader`."""
        x, residual = self.fc(octavo_kernels.concat(self.embed_tokens(input_ids), before)), None
        return self._run(x, residual, 0, positions, ctx)

    def _run(self, x: Tensor, residual: Tensor | None, first: int, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Run the layers from number ``first`` on; returns the sum of residual and output."""
        for layer in self.layers[first:]:
            x, residual = layer(x, residual, positions, ctx)
        return x if residual is None else octavo_kernels.add(residual, x)


class EagleModel(StateReader, LlamaForCausalLM):
    """The draft head of EAGLE-1 and 2."""

    text: EagleConfig
    model: EagleDecoder
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"^model\.(?=lm_head\.)", ""),
        *LlamaForCausalLM.checkpoint_names,
    ]

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        if not self.text.own_embedding:
            self.model.embed_tokens = OfTarget()  # type: ignore[assignment]
        self.lm_head = self.create_head()

    def attach(self, target: CausalLM) -> None:
        """Take the embedding and the head of ``target`` where there are no own ones."""
        if isinstance(self.model.embed_tokens, OfTarget):
            self.model.embed_tokens = target.model.embed_tokens
        if isinstance(self.lm_head, OfTarget):
            self.lm_head = target.lm_head

    def create_head(self) -> ParallelLMHead:
        """The head, or `OfTarget`."""
        config, text = self.config, self.text
        if not text.own_head:
            return OfTarget()  # type: ignore[return-value]
        return ParallelLMHead(text.draft_vocab_size, config.hidden_size, self.tp, scale=text.logit_scale)

    def create_decoder(
        self, embed_tokens: VocabParallelEmbedding, layers: list[DecoderLayer], embedding_scale: float
    ) -> Decoder:
        """See `LlamaForCausalLM`."""
        size = self.config.hidden_size
        fc = ReplicatedLinear(2 * size, size, self.text.fc_bias, self.tp)
        return EagleDecoder(embed_tokens, layers, fc)

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``: the first one has no norm at its input."""
        norm = cast(RMSNorm, NoNorm() if layer == 0 else self.create_norm())
        attention = self.create_attention(layer, rotary)
        return PreNormDecoderLayer(norm, attention, cast(RMSNorm, self.create_norm()), self.create_mlp())

    def predict(
        self, input_ids: Tensor, before: Tensor, positions: Tensor, ctx: ForwardContext, number: int = 0
    ) -> Tensor:
        """See `StateReader`."""
        return self.model.predict(input_ids, before, positions, ctx)

    def head(self, number: int) -> ParallelLMHead:
        """See `StateReader`."""
        return self.lm_head

    def head_input(self, state: Tensor, number: int) -> Tensor:
        """See `StateReader`."""
        return state


class Eagle3Layer(PreNormDecoderLayer):
    """The first layer: its attention reads embeddings and states, a norm of each, side by side."""

    def __init__(self, model: Eagle3Model, attention: SelfAttention, config: ModelConfig, tp: TensorParallel) -> None:
        norms = [cast(RMSNorm, model.create_norm()) for _ in range(3)]
        # A norm whose output is not quantised as its linear layer would have it, see `layers.fusion`.
        super().__init__(cast(RMSNorm, NoNorm()), attention, norms[0], model.create_mlp())
        self.embed_norm, self.hidden_norm = norms[1:]
        self.residual_is_normed = model.text.norm_before_residual
        sizes = (config.head_size, config.num_heads, config.num_kv_heads)
        attention.qkv_proj = QKVParallelLinear(2 * config.hidden_size, *sizes, model.qkv_bias, tp)

    def fuse(
        self, tokens: Tensor, states: Tensor, positions: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the first layer from embeddings and states, ``[T, H]`` each; returns as `DecoderLayer.forward`."""
        normed = self.hidden_norm(states)[0]
        deferred: DeferredHidden = (
            self.self_attn(octavo_kernels.concat(self.embed_norm(tokens)[0], normed), positions, ctx),
            normed if self.residual_is_normed else states,
        )
        return self.finish(*deferred)


class Eagle3Decoder(EagleDecoder):
    """``fc`` brings the tapped states together, after a norm of each of them (``fc_norm``) or of all (``input_norm``),
    if any."""

    def __init__(
        self,
        embed_tokens: VocabParallelEmbedding,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        fc: nn.Module,
        text: Eagle3Config,
        sizes: tuple[int, int],
    ) -> None:
        """``sizes``: of a tapped state, and how many there are; ``text``: the configuration's fields."""
        super().__init__(embed_tokens, layers, fc)
        self.norm, self._norms_output, eps = norm, text.norm_output, text.rms_norm_eps
        size, count = sizes
        self.input_norm = RMSNorm(size * count, eps) if text.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in range(count)) if text.fc_norm else None
        vocabulary = (text.draft_vocab_size, text.vocab_size, "d2t")
        self.vocabulary = DraftVocabulary(*vocabulary) if text.maps_tokens else None

    def join(self, tapped: tuple[Tensor, ...]) -> Tensor:
        """The tapped states ``[R, Ht]`` as one, ``[R, H]``."""
        if self.fc_norm is not None:
            tapped = tuple(norm(state)[0] for norm, state in zip(self.fc_norm, tapped, strict=True))
        states = octavo_kernels.concat(*tapped)
        joined: Tensor = self.fc(states if self.input_norm is None else self.input_norm(states)[0])
        return joined

    def predict(self, input_ids: Tensor, before: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """See `octavo.models.state_reader.StateReader`."""
        first = cast(Eagle3Layer, self.layers[0])
        x, residual = first.fuse(self.embed_tokens(input_ids), before, positions, ctx)
        state = self._run(x, residual, 1, positions, ctx)
        return self.normed(state) if self._norms_output else state

    def normed(self, state: Tensor) -> Tensor:
        """The head's input."""
        return cast(Tensor, cast(RMSNorm, self.norm)(state)[0])

    def head_input(self, state: Tensor) -> Tensor:
        """`normed`, of what `predict` returned."""
        return state if self._norms_output else self.normed(state)


class Eagle3Model(EagleModel):
    """The draft head of EAGLE-3, with Llama's layers."""

    text: Eagle3Config
    model: Eagle3Decoder
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"^(model\.)?(t2d$|verifier_)", None),
        (r"^(model\.)?d2t$", "vocabulary.d2t"),
        (r"^(model\.)?midlayer\.", "layers.0."),
        (r"^(model\.)?layers\.0\.input_layernorm\.", "layers.0.embed_norm."),
        *EagleModel.checkpoint_names,
    ]

    @property
    def qkv_bias(self) -> bool:
        """True if queries, keys and values of the first layer have biases."""
        return self.text.attention_bias

    def attach(self, target: CausalLM) -> None:
        """Attach, and have ``target`` keep the states that are read of it."""
        super().attach(target)
        target.model.taps = tuple(self.text.taps)

    def read(self, target: CausalLM, deferred: DeferredHidden, hidden: Tensor) -> Tensor:
        """See `StateReader`: made of what layers of ``target`` were given."""
        return self.model.join(target.tapped(*deferred))

    def create_decoder(
        self, embed_tokens: VocabParallelEmbedding, layers: list[DecoderLayer], embedding_scale: float
    ) -> Decoder:
        """See `LlamaForCausalLM`."""
        text, size = self.text, self.config.hidden_size
        taps = (text.target_hidden_size, len(text.taps))
        fc = ReplicatedLinear(taps[0] * taps[1], size, text.fc_bias, self.tp)
        return Eagle3Decoder(embed_tokens, layers, cast(RMSNorm, self.create_norm()), fc, text, taps)

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        if layer > 0:
            return LlamaForCausalLM.create_layer(self, layer, rotary)
        return Eagle3Layer(self, self.create_attention(layer, rotary), self.config, self.tp)

    def head_input(self, state: Tensor, number: int) -> Tensor:
        """See `StateReader`."""
        return self.model.head_input(state)

    def draft_vocabulary(self) -> DraftVocabulary | None:
        """See `StateReader`."""
        return self.model.vocabulary


class Eagle3Qwen3Model(Eagle3Model, Qwen3ForCausalLM):
    """The draft head of EAGLE-3, with Qwen3's layers."""

    text: Eagle3Qwen3Config
