"""DeepSeek V2, V2-Lite, V3, R1 and Kimi K2: multi-head latent attention, experts behind the first layers."""

from __future__ import annotations

from typing import ClassVar

from octavo.layers.decoder import DecoderLayer, PreNormDecoderLayer
from octavo.layers.latent_attention import LatentSelfAttention
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.base import CausalLM
from octavo.models.llama import LlamaForCausalLM


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    """The chosen experts' scores are used as they are."""

    def create_rotary(self) -> RotaryEmbedding:
        """Of the rotary part of queries, and of the key that heads share."""
        return RotaryEmbedding(self.config, self.config.hf_config["qk_rope_head_dim"])

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        assert rotary is not None
        interleaved = self.config.hf_config.get("rope_interleave", True)
        attention = LatentSelfAttention(self.config, layer, self.tp, rotary, interleaved)
        return PreNormDecoderLayer(self.create_norm(), attention, self.create_norm(), self.create_mlp())


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """Experts are chosen within groups, with a bias of the choice."""

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"^model\.layers\.61\.", None),  # predicts a token more, for speculation
        *CausalLM.checkpoint_names,
    ]
