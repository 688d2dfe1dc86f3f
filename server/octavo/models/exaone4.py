"""EXAONE 4."""

from __future__ import annotations

from octavo.interface.model_config.exaone4 import Exaone4Config
from octavo.layers.attention import SelfAttention
from octavo.layers.decoder import DecoderLayer
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.llama import LlamaForCausalLM
from octavo.models.olmo2 import OlmoDecoderLayer
from octavo_kernels import AttentionOptions


class Exaone4ForCausalLM(LlamaForCausalLM):
    """Norms behind blocks, and of each query and key head. Where some layers have a window, others see no positions."""

    text: Exaone4Config

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        text, hidden = self.text, self.config.hidden_size
        norm, last_norm = (RMSNorm(hidden, text.rms_norm_eps) for _ in range(2))
        mlp = GatedMLP(hidden, text.intermediate_size, False, text.hidden_act, self.tp)
        return OlmoDecoderLayer(self.create_attention(layer, rotary), norm, mlp, last_norm)

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        window = self.text.window(layer)
        turned = rotary if window is not None or self.text.sliding_window is None else None
        return SelfAttention(self.config, layer, self.tp, turned, qk_norm=True, options=AttentionOptions(window=window))
