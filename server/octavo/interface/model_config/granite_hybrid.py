"""Granite 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from octavo.interface.config_checks import MAX_EXPERTS, MAX_WIDTH, Fields
from octavo.interface.model_config.declarations import choice, integer
from octavo.interface.model_config.experts import ExpertsConfig
from octavo.interface.model_config.granite import GraniteConfig
from octavo.interface.model_config.state_space import StateSpaceConfig

_MAMBA = ("mamba", "linear_attention")


class GraniteMoeHybridConfig(StateSpaceConfig, GraniteConfig, ExpertsConfig):
    """Layers with attention or Mamba 2, then experts, if there are any, and a shared MLP."""

    kinds_of_layers: ClassVar[tuple[str, ...]] = ("full_attention", "attention", *_MAMBA)
    aliases: ClassVar[Mapping[str, str]] = {**ExpertsConfig.aliases, "layers_block_type": "layer_types"}

    num_experts: int = integer(0, MAX_EXPERTS, 8)
    num_experts_per_tok: int = integer(0, MAX_EXPERTS, 2)
    shared_intermediate_size: int = integer(1, MAX_WIDTH * 4, 1024)
    position_embedding_type: str | None = choice(("rope", "nope"), None, 'must be "rope", "nope" or null')

    def is_recurrent(self, layer: int) -> bool:
        """See `HybridConfig`."""
        return self.layer_types is None or self.layer_types[layer] in _MAMBA

    @property
    def inner_size(self) -> int:
        """See `TextConfig`."""
        return max(self.shared_intermediate_size, self.num_experts and self.num_experts_per_tok * self.expert_size)

    def check_experts(self, fields: Fields) -> None:
        """See `ExpertsConfig`."""
        if self.num_experts:
            super().check_experts(fields)
