"""Falcon-H1: attention and Mamba 2 side by side in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from octavo.interface.model_config.falcon_h1 import FalconH1Config
from octavo.layers.attention import SelfAttention
from octavo.layers.decoder import DecoderLayer
from octavo.layers.mamba2 import Mamba2Mixer, MixerSettings
from octavo.layers.mlp import GatedMLP
from octavo.layers.recurrent import ParallelMixerDecoderLayer
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.bamba import BambaForCausalLM
from octavo.models.mamba2_hybrid import Mamba2HybridForCausalLM


class FalconH1ForCausalLM(Mamba2HybridForCausalLM):
    """Multipliers are those of weights, which are multiplied once, as they are read; GGUF files hold them so."""

    text: FalconH1Config

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = BambaForCausalLM.checkpoint_names

    def scales(self) -> tuple[float, float]:
        """The factors of embeddings and of logits."""
        return self.text.embedding_multiplier, self.text.lm_head_multiplier

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        attention, mixer = self.create_attention(layer, rotary), self.create_mixer(layer)
        return ParallelMixerDecoderLayer(
            self.create_norm(), attention, mixer, self.create_norm(), self.create_mlp(), name=self.mixer_name
        )

    def mixer_settings(self) -> MixerSettings:
        """The family's kind of mixer."""
        text = self.text
        return replace(
            super().mixer_settings(),
            out_bias=text.projectors_bias,
            has_norm=text.mamba_rms_norm,
            gates_first=not text.mamba_norm_before_gate,
        )

    def create_mixer(self, number: int) -> Mamba2Mixer:
        """The mixer of layer number ``number``."""
        text, mixer = self.text, super().create_mixer(number)
        mixer.in_proj.multiply_parts(*((text.ssm_in_multiplier * part, part) for part in text.ssm_multipliers))
        mixer.out_proj.multiply_parts((text.ssm_out_multiplier, text.ssm_out_multiplier))
        return mixer

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        text, attention = self.text, super().create_attention(layer, rotary)
        before, key, behind = text.attention_in_multiplier, text.key_multiplier, text.attention_out_multiplier
        attention.qkv_proj.multiply_parts((before, 1.0), (before * key, key), (before, 1.0))
        attention.o_proj.multiply_parts((behind, behind))
        return attention

    def create_mlp(self) -> GatedMLP:
        """The MLP of one layer."""
        text = self.text
        mlp = GatedMLP(text.hidden_size, text.intermediate_size, text.mlp_bias, text.hidden_act, self.tp)
        gate, down = text.mlp_multipliers
        mlp.gate_up_proj.multiply_parts((gate, gate), (1.0, 1.0))
        mlp.down_proj.multiply_parts((down, down))
        return mlp
