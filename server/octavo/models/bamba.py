"""Bamba: Mamba 2, and attention in a few layers."""

from __future__ import annotations

from typing import ClassVar

from octavo.interface.model_config.bamba import BambaConfig
from octavo.layers.rotary import RotaryEmbedding, rotary_size
from octavo.models.mamba2_hybrid import Mamba2HybridForCausalLM


class BambaForCausalLM(Mamba2HybridForCausalLM):
    """A hybrid of Llama and Mamba 2 that turns a part of each head."""

    text: BambaConfig

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"^model\.final_layernorm\.", "model.norm."),
        (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
        (r"\.feed_forward\.", ".mlp."),
        *Mamba2HybridForCausalLM.checkpoint_names,
    ]

    def create_rotary(self) -> RotaryEmbedding:
        """The rotary embedding that layers share."""
        return RotaryEmbedding(self.config, rotary_size(self.config))
