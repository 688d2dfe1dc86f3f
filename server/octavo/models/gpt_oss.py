"""gpt-oss (OpenAI): experts with clamped gates, sinks in attention, a window in every other layer."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from octavo.interface.model_config.gpt_oss import GptOssConfig
from octavo.layers.attention import SelfAttention
from octavo.layers.moe import FusedMoE, Routing
from octavo.layers.norm import RMSNorm
from octavo.layers.quantization.base import ExpertSettings
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.base import CausalLM
from octavo.models.llama import LlamaForCausalLM
from octavo_kernels import AttentionOptions


class GptOssForCausalLM(LlamaForCausalLM):
    """A softmax over the logits of the chosen experts, which is that over all of them made to add up to 1."""

    text: GptOssConfig

    stacked_experts: ClassVar[tuple[bool, bool]] = (True, True)
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"\.self_attn\.sinks(\.weight)?$", ".self_attn.attn.sinks"),
        (r"\.mlp\.router\.", ".mlp.gate."),
        *CausalLM.checkpoint_names,
    ]

    def create_norm(self) -> RMSNorm:
        """A norm of hidden states, whose weight is applied before anything is rounded."""
        return RMSNorm(self.config.hidden_size, self.text.rms_norm_eps, 0.0)

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        bias, window = self.text.attention_bias, self.text.window(layer)
        return SelfAttention(
            self.config,
            layer,
            self.tp,
            rotary,
            AttentionOptions(window=window),
            qkv_bias=bias,
            out_bias=bias,
            sinks=True,
        )

    def create_mlp(self) -> nn.Module:
        """The experts of one layer."""
        text = self.text
        sizes = text.num_experts, self.config.hidden_size, text.intermediate_size
        settings = ExpertSettings(*sizes, "clamped_swiglu", bias=True, limit=text.swiglu_limit)
        return FusedMoE(settings, Routing(text.num_experts_per_tok, bias=True), self.tp)
