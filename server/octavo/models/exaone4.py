"""EXAONE 4."""

from __future__ import annotations

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

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        hf, hidden = self.config.hf_config, self.config.hidden_size
        norm, last_norm = (RMSNorm(hidden, hf.get("rms_norm_eps", 1e-5)) for _ in range(2))
        mlp = GatedMLP(hidden, hf["intermediate_size"], False, hf.get("hidden_act", "silu"), self.tp)
        return OlmoDecoderLayer(self.create_attention(layer, rotary), norm, mlp, last_norm)

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        hf = self.config.hf_config
        types, window = hf.get("layer_types"), hf.get("sliding_window", 4096)
        slides = types[layer] == "sliding_attention" if types else (layer + 1) % hf.get("sliding_window_pattern", 4)
        turned = rotary if slides or window is None else None
        return SelfAttention(
            self.config, layer, self.tp, turned, AttentionOptions(window=window if slides else None), qk_norm=True
        )
