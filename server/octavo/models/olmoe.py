"""OLMoE."""

from __future__ import annotations

from torch import nn

from octavo.errors import ModelError
from octavo.interface.model_config.olmoe import OlmoeConfig
from octavo.layers.attention import SelfAttention
from octavo.layers.moe import FusedMoE, Routing, expert_settings
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.llama import LlamaForCausalLM
from octavo.models.olmo2 import OlmoSelfAttention


class OlmoeForCausalLM(LlamaForCausalLM):
    """Llama with norms of all queries and keys of a token, and experts in every layer."""

    text: OlmoeConfig

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        if self.text.clip_qkv is not None:
            raise ModelError(f"{self.config.model}: clip_qkv is not supported; OLMoE's released models have none")
        return OlmoSelfAttention(self.config, layer, self.tp, rotary, None)

    def create_mlp(self) -> nn.Module:
        """The experts of one layer."""
        text = self.text
        sizes = text.num_experts, self.config.hidden_size, text.intermediate_size
        routing = Routing(text.num_experts_per_tok, renormalise=text.norm_topk_prob)
        return FusedMoE(expert_settings(*sizes, text.hidden_act), routing, self.tp)
