"""Mixtral: Mistral with a mixture of experts in place of each MLP."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from octavo.interface.model_config.mixtral import MixtralConfig
from octavo.layers.moe import FusedMoE, Routing, expert_settings
from octavo.models.base import CausalLM
from octavo.models.llama import MistralForCausalLM


class MixtralForCausalLM(MistralForCausalLM):
    """Scores of the chosen experts add up to 1."""

    text: MixtralConfig

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
        (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
        *CausalLM.checkpoint_names,
    ]

    def create_mlp(self) -> nn.Module:
        """The experts of one layer."""
        text = self.text
        sizes = text.num_experts, self.config.hidden_size, text.intermediate_size
        return FusedMoE(expert_settings(*sizes, text.hidden_act), Routing(text.num_experts_per_tok), self.tp)
