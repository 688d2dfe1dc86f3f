"""OLMoE."""

from __future__ import annotations

from torch import nn

from octavo.errors import ModelError
from octavo.layers.attention import SelfAttention
from octavo.layers.moe import FusedMoE, Routing, expert_settings
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.llama import LlamaForCausalLM
from octavo.models.olmo2 import OlmoSelfAttention


class OlmoeForCausalLM(LlamaForCausalLM):
    """Llama with norms of all queries and keys of a token, and experts in every layer."""

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        if self.config.hf_config.get("clip_qkv") is not None:
            raise ModelError(f"{self.config.model}: clip_qkv is not supported; OLMoE's released models have none")
        return OlmoSelfAttention(self.config, layer, self.tp, rotary, None)

    def create_mlp(self) -> nn.Module:
        """The experts of one layer."""
        hf = self.config.hf_config
        sizes = hf["num_experts"], self.config.hidden_size, hf["intermediate_size"]
        routing = Routing(hf["num_experts_per_tok"], renormalise=hf.get("norm_topk_prob", False))
        return FusedMoE(expert_settings(*sizes, hf.get("hidden_act", "silu")), routing, self.tp)
