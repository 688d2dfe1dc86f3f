"""Nemotron-H and Nemotron Nano 2: layers that are each a Mamba 2, an attention or an MLP."""

from __future__ import annotations

from typing import ClassVar, cast

from torch import Tensor

from octavo.interface.model_config.nemotron_h import NemotronHConfig
from octavo.layers.attention import ForwardContext, SelfAttention
from octavo.layers.decoder import DecoderLayer, DeferredHidden
from octavo.layers.mamba2 import Mamba2Mixer
from octavo.layers.mlp import SquaredMLP
from octavo.layers.norm import LayerNorm, RMSNorm
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.mamba2_hybrid import Mamba2HybridForCausalLM


class MixerDecoderLayer(DecoderLayer):
    """One mixer behind a norm."""

    def __init__(self, norm: RMSNorm | LayerNorm, mixer: Mamba2Mixer | SelfAttention | SquaredMLP) -> None:
        super().__init__()
        self.norm, self.mixer = norm, mixer

    def attend(self, x: Tensor, residual: Tensor | None, positions: Tensor, ctx: ForwardContext) -> DeferredHidden:
        """See `DecoderLayer`."""
        x, residual = self.norm(x, residual)
        if isinstance(self.mixer, Mamba2Mixer):
            return *self.mixer(x, ctx), cast(Tensor, residual)
        mixed = self.mixer(x, positions, ctx) if isinstance(self.mixer, SelfAttention) else x
        return mixed, cast(Tensor, residual)

    def finish(self, *deferred: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `DecoderLayer`."""
        *mixed, residual = deferred
        if isinstance(self.mixer, Mamba2Mixer):
            return self.mixer.finish(*mixed), residual
        out = self.mixer.o_proj if isinstance(self.mixer, SelfAttention) else self.mixer
        return out(mixed[0]), residual


class NemotronHForCausalLM(Mamba2HybridForCausalLM):
    """Layers as the pattern has them; MTP layers are left out."""

    text: NemotronHConfig

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"^mtp\.", None),
        (r"^backbone\.", "model."),
        (r"^model\.embeddings\.", "model.embed_tokens."),
        (r"^model\.norm_f\.", "model.norm."),
        *Mamba2HybridForCausalLM.checkpoint_names,
    ]

    def create_rotary(self) -> RotaryEmbedding | None:
        """No layer has positions."""
        return None

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        kind = self.text.kind(layer)
        number = sum(self.text.kind(other) == kind for other in range(layer))
        return MixerDecoderLayer(self.create_norm(), self._create_mixer_of(kind, number))

    def _create_mixer_of(self, kind: str, number: int) -> Mamba2Mixer | SelfAttention | SquaredMLP:
        text = self.text
        if kind == "mamba":
            return self.create_mixer(number)
        if kind == "attention":
            return SelfAttention(self.config, number, self.tp, None)
        return SquaredMLP(text.hidden_size, text.intermediate_size, text.mlp_bias, self.tp)
