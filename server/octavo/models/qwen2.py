"""Qwen2 and Qwen2.5 (dense)."""

from __future__ import annotations

from typing import Any

from octavo.interface.engine_config import ModelConfig
from octavo.models.llama import AttentionOptions, LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    @staticmethod
    def attention_options(config: ModelConfig, layer: int) -> AttentionOptions:
        return AttentionOptions(qkv_bias=True, window=layer_window(config.hf_config, layer))


def layer_window(hf_config: dict[str, Any], layer: int) -> int | None:
    """The sliding window of a layer: only with ``use_sliding_window``, in the layers that ``layer_types`` names or,
    where it is not given, in those from ``max_window_layers`` on."""
    if not hf_config.get("use_sliding_window", False):
        return None
    window = hf_config.get("sliding_window", 4096)
    types = hf_config.get("layer_types")
    slides = types[layer] == "sliding_attention" if types else layer >= hf_config.get("max_window_layers", 28)
    return window if slides else None
