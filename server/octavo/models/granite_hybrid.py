"""Granite 4: attention, Mamba 2 or both, with experts and without."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from octavo.interface.model_config.granite_hybrid import GraniteMoeHybridConfig
from octavo.layers.mlp import GatedMLP, SharedMLP
from octavo.layers.moe import FusedMoE, Routing, expert_settings
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.granite import GraniteForCausalLM
from octavo.models.granite_moe import GraniteMoeForCausalLM
from octavo.models.mamba2_hybrid import Mamba2HybridForCausalLM


class GraniteMoeHybridForCausalLM(Mamba2HybridForCausalLM, GraniteForCausalLM):
    """Granite with Mamba 2 in some layers, and a shared MLP in all, beside experts where there are any."""

    text: GraniteMoeHybridConfig
    mixer_name: ClassVar[str] = "mamba"

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = GraniteMoeForCausalLM.checkpoint_names

    @property
    def residual_scale(self) -> float:
        """The factor of what is added to the residual."""
        return self.text.residual_multiplier

    def create_rotary(self) -> RotaryEmbedding | None:
        """The rotary embedding that layers share; some models have none."""
        return super().create_rotary() if self.text.position_embedding_type == "rope" else None

    def create_mlp(self) -> nn.Module:
        """The MLP of one layer, or its experts and the MLP beside them."""
        text, hidden = self.text, self.config.hidden_size
        shared = GatedMLP(hidden, text.shared_intermediate_size, False, text.hidden_act, self.tp)
        if not text.num_experts:
            return SharedMLP(shared)
        settings = expert_settings(text.num_experts, hidden, text.intermediate_size, text.hidden_act)
        return FusedMoE(settings, Routing(text.num_experts_per_tok), self.tp, shared)
