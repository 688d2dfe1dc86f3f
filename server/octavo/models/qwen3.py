"""Qwen3 (dense): Qwen2's windows, no bias, and a norm of each query and key head."""

from __future__ import annotations

from octavo.interface.engine_config import ModelConfig
from octavo.models.llama import AttentionOptions, LlamaForCausalLM
from octavo.models.qwen2 import layer_window


class Qwen3ForCausalLM(LlamaForCausalLM):
    @staticmethod
    def attention_options(config: ModelConfig, layer: int) -> AttentionOptions:
        bias = config.hf_config.get("attention_bias", False)
        window = layer_window(config.hf_config, layer)
        return AttentionOptions(qkv_bias=bias, out_bias=bias, qk_norm=True, window=window)
