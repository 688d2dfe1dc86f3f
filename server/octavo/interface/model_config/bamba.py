"""Bamba."""

from __future__ import annotations

from typing import ClassVar

from octavo.interface.model_config.declarations import integers
from octavo.interface.model_config.state_space import StateSpaceConfig
from octavo.interface.model_config.text import PartialRotaryConfig


class BambaConfig(StateSpaceConfig, PartialRotaryConfig):
    """Mamba 2 in all layers but ``attn_layer_indices``, whose attention turns half of each head unless
    ``rope_parameters`` say otherwise."""

    ignored: ClassVar[frozenset[str]] = frozenset({"layer_types", "layers_block_type", "partial_rotary_factor"})

    partial_rotary_factor: float = 0.5
    num_key_value_heads: int | None = 8
    rms_norm_eps: float = 1e-5
    attn_layer_indices: list[int] | None = integers("must be a list of layers")

    def is_recurrent(self, layer: int) -> bool:
        """See `HybridConfig`."""
        return layer not in (self.attn_layer_indices or ())
