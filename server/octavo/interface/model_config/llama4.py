"""Llama 4 (text)."""

from __future__ import annotations

from typing import ClassVar

from octavo.interface.config_checks import MAX_FACTOR, MAX_LAYERS, MAX_WIDTH
from octavo.interface.model_config.declarations import flag, integer, integers, number, turns
from octavo.interface.model_config.experts import ExpertsConfig


class Llama4Config(ExpertsConfig):
    """Layers that turn and attend within chunks, and others; layers with experts, and others."""

    kinds_of_layers: ClassVar[tuple[str, ...]] = ("full_attention", "chunked_attention")

    num_experts: int = 16
    num_experts_per_tok: int = 1
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    rms_norm_eps: float = 1e-5
    rope_theta: float = 5e5
    intermediate_size_mlp: int = integer(1, MAX_WIDTH * 4, 16384)
    interleave_moe_layer_step: int = integer(1, MAX_WIDTH * 4, 1)
    moe_layers: list[int] | None = integers("must be a list of numbers of layers")
    no_rope_layers: list[int] | None = turns()
    no_rope_layer_interval: int = integer(1, MAX_LAYERS, 4)
    attention_chunk_size: int = integer(1, MAX_WIDTH * 4, 8192)
    use_qk_norm: bool = flag(True)
    attn_temperature_tuning: bool = flag(True)
    floor_scale: int = integer(1, MAX_WIDTH * 4, 8192)
    attn_scale: float = number(0.0, MAX_FACTOR, 0.1)

    def turned(self, layer: int) -> bool:
        """True if layer number ``layer`` has rotary embeddings."""
        turns = self.no_rope_layers
        return bool(turns[layer] if turns else (layer + 1) % self.no_rope_layer_interval)

    def window(self, layer: int) -> int | None:
        """See `TextConfig`: the chunk that layer number ``layer`` attends within."""
        kinds = self.layer_types
        chunked = kinds[layer] == "chunked_attention" if kinds else self.turned(layer)
        return self.attention_chunk_size if chunked else None

    def is_sparse(self, layer: int) -> bool:
        """True if layer number ``layer`` has experts."""
        if self.moe_layers is None:  # an empty list: none
            return (layer + 1) % self.interleave_moe_layer_step == 0
        return layer in self.moe_layers
