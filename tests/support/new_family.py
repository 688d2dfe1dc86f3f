"""A family that differs from Llama in the names of its weights and in an activation, written as a newcomer would."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from octavo.layers.mlp import GatedMLP
from octavo.models.base import CausalLM
from octavo.models.llama import LlamaForCausalLM


class SproutForCausalLM(LlamaForCausalLM):
    """Llama with GELU gates."""

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"\.attn\.causal_mask$", None),
        (r"^transformer\.wte\.", "model.embed_tokens."),
        (r"^transformer\.ln_f\.", "model.norm."),
        (r"^transformer\.h\.", "model.layers."),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.ln_2\.", ".post_attention_layernorm."),
        (r"\.attn\.([qkvo])\.", r".self_attn.\1_proj."),
        (r"\.ffn\.(gate|up|down)\.", r".mlp.\1_proj."),
        (r"^head\.", "lm_head."),
        *CausalLM.checkpoint_names,
    ]

    def create_mlp(self) -> nn.Module:
        """The MLP of one layer."""
        return GatedMLP(self.config.hidden_size, self.text.intermediate_size, False, "gelu", self.tp)
