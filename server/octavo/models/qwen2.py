"""Qwen2 and Qwen2.5 (dense)."""

from __future__ import annotations

from typing import Any

from octavo.layers.attention import SelfAttention
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.llama import LlamaForCausalLM
from octavo_kernels import AttentionOptions


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama with biases of queries, keys and values, and sliding windows in some layers."""

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        window = layer_window(self.config.hf_config, layer)
        return SelfAttention(self.config, layer, self.tp, rotary, AttentionOptions(window=window), qkv_bias=True)


def layer_window(hf_config: dict[str, Any], layer: int) -> int | None:
    """The sliding window of a layer in tokens: only with ``use_sliding_window``, in the layers that ``layer_types``
    names or, where it is not given, in those from ``max_window_layers`` on."""
    if not hf_config.get("use_sliding_window", False):
        return None
    window = hf_config.get("sliding_window", 4096)
    types = hf_config.get("layer_types")
    slides = types[layer] == "sliding_attention" if types else layer >= hf_config.get("max_window_layers", 28)
    return window if slides else None
