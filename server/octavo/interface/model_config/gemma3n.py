"""Gemma 3n (text)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.interface.config_checks import MAX_STREAMS, MAX_WIDTH, Fields
from octavo.interface.model_config.declarations import declare, flag, integer
from octavo.interface.model_config.gemma4 import PerLayerGemmaConfig


def _sparsity(fields: Fields, key: str) -> list[float]:
    """Read one sparsity for each layer, from 0 to below 1."""
    found, count = fields.config[key], fields.config["num_hidden_layers"]
    numbers: list[Any] = found if isinstance(found, list) and len(found) == count else [None]
    if not all(isinstance(part, (int, float)) and type(part) is not bool and 0 <= part < 1 for part in numbers):
        fields.refuse(key, f"must be a number from 0 to below 1 for each of {count} layers")
    return numbers


class Gemma3nConfig(PerLayerGemmaConfig):
    """Several streams of hidden states (AltUp)."""

    vocab_size: int = 262400
    hidden_size: int = 2048
    intermediate_size: int = 16384
    num_hidden_layers: int = 35
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 2
    max_position_embeddings: int | None = 32768
    sliding_window: int | None = 512
    sliding_window_pattern: int = 5
    final_logit_softcapping: float | None = 30.0
    rope_theta: float = 1e6
    rope_local_base_freq: float | None = 10000.0
    hidden_size_per_layer_input: int = integer(1, MAX_WIDTH, 256)
    num_kv_shared_layers: int = 15
    altup_num_inputs: int = integer(2, MAX_STREAMS, 4)
    altup_active_idx: int = integer(0, MAX_STREAMS - 1, 0)
    altup_correct_scale: bool = flag(True)
    laurel_rank: int = integer(1, MAX_WIDTH, 64)
    activation_sparsity_pattern: list[float] | None = declare(_sparsity, None)

    @classmethod
    def in_common_words(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `TextConfig`; the width of MLPs may be said once for each layer."""
        found = super().in_common_words(config)
        widths, count = found.get("intermediate_size"), found.get("num_hidden_layers", cls.num_hidden_layers)
        counted = isinstance(widths, list) and (len(widths) == count or type(count) is not int)
        if isinstance(widths, list) and widths and counted and all(width == widths[0] for width in widths):
            found["intermediate_size"] = widths[0]
        return found

    @property
    def deferred_size(self) -> int:
        """See `TextConfig`; the streams go on beside the active one and its norm."""
        return self.hidden_size * (self.altup_num_inputs + 2) + self.hidden_size_per_layer_input

    def sparsity(self, layer: int) -> float:
        """The part of layer number ``layer``'s gates that count for nothing."""
        if self.activation_sparsity_pattern is not None:
            return self.activation_sparsity_pattern[layer]
        return 0.95 if layer < 10 < self.num_hidden_layers else 0.0

    def check(self, fields: Fields) -> None:
        """See `TextConfig`."""
        super().check(fields)
        if self.altup_active_idx >= self.altup_num_inputs:
            fields.refuse("altup_active_idx", f"must be an integer from 0 to {self.altup_num_inputs - 1}")
