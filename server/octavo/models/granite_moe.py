"""Granite 3's mixtures of experts, with a shared MLP where the checkpoint has one."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from octavo.interface.model_config.granite_moe import GraniteMoeConfig
from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import FusedMoE, Routing, expert_settings
from octavo.models.granite import GraniteForCausalLM


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """Granite with experts in every layer."""

    text: GraniteMoeConfig

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"\.block_sparse_moe\.input_linear\.", ".mlp.experts.gate_up_proj."),
        (r"\.block_sparse_moe\.output_linear\.", ".mlp.experts.down_proj."),
        (r"\.block_sparse_moe\.router\.(layer\.)?", ".mlp.gate."),
        (r"\.block_sparse_moe\.experts\.", ".mlp.experts."),
        (r"\.shared_mlp\.input_linear\.", ".mlp.shared_expert.gate_up_proj."),
        (r"\.shared_mlp\.output_linear\.", ".mlp.shared_expert.down_proj."),
        *GraniteForCausalLM.checkpoint_names,
    ]

    def create_mlp(self) -> nn.Module:
        """The experts of one layer."""
        text, hidden = self.text, self.config.hidden_size
        act, shared = text.hidden_act, text.shared_intermediate_size
        shared_expert = GatedMLP(hidden, shared, False, act, self.tp) if shared else None
        settings = expert_settings(text.num_experts, hidden, text.intermediate_size, act)
        return FusedMoE(settings, Routing(text.num_experts_per_tok), self.tp, shared_expert)


class GraniteMoeSharedForCausalLM(GraniteMoeForCausalLM):
    """Granite's mixtures under the name of those that have a shared MLP."""
