"""Gemma 4 (text)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

from octavo.interface.config_checks import (
    MAX_EXPERTS,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
)
from octavo.interface.model_config.declarations import flag, integer, table
from octavo.interface.model_config.experts import ExpertsConfig
from octavo.interface.model_config.gemma import WindowedGemmaConfig


class PerLayerGemmaConfig(WindowedGemmaConfig):
    """Fields of Gemma 3n and 4: the last layers share others' keys and values, and each has embeddings of its own."""

    vocab_size_per_layer_input: int = integer(1, MAX_VOCAB, 262144)
    hidden_size_per_layer_input: int | None = integer(0, MAX_WIDTH, 256, null=True)
    num_kv_shared_layers: int = integer(0, MAX_LAYERS, 0)

    @property
    def deferred_size(self) -> int:
        """See `TextConfig`."""
        return self.hidden_size + (self.hidden_size_per_layer_input or 0)

    def keys_are_values(self, layer: int) -> bool:
        """True if layer number ``layer`` uses its keys as values, too."""
        return False

    @property
    def first_shared_layer(self) -> int:
        """The number of the first layer without keys and values of its own."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    def check(self, fields: Fields) -> None:
        """See `TextConfig`."""
        super().check(fields)
        shared, name = self.num_kv_shared_layers, fields.name("num_kv_shared_layers")
        if self.first_shared_layer < 1:
            limit = self.num_hidden_layers - 1
            raise fields.error(f"{name} must be an integer from 0 to {limit}, got {shared}")
        if without := set(self.kinds) - set(self.kinds[: self.first_shared_layer]):
            raise fields.error(f"{name} ({shared}) leaves no layer of type {without.pop()} with keys and values")


class Gemma4Config(PerLayerGemmaConfig, ExpertsConfig):
    """Layers without a window have heads of another size; the last layer has none, whatever ``layer_types`` says."""

    aliases: ClassVar[Mapping[str, str]] = {"top_k_experts": "num_experts_per_tok"}
    layers_may_differ: ClassVar[bool] = True

    vocab_size: int = 262144
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    max_position_embeddings: int | None = 131072
    sliding_window: int | None = 512
    sliding_window_pattern: int = 6
    global_head_dim: int = integer(2, MAX_HEAD_SIZE, 512)
    num_global_key_value_heads: int | None = integer(1, MAX_HEADS, None)
    attention_k_eq_v: bool = flag(False)
    enable_moe_block: bool = flag(False)
    use_double_wide_mlp: bool = flag(False)
    num_experts: int = integer(0, MAX_EXPERTS, 0)
    num_experts_per_tok: int = integer(0, MAX_EXPERTS, 0)
    rope_parameters: dict[str, Any] | None = table(
        {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        }
    )

    @property
    def kinds(self) -> list[str]:
        """See `WindowedGemmaConfig`."""
        return [*super().kinds[:-1], "full_attention"]

    @property
    def expert_count(self) -> int:
        """See `TextConfig`."""
        return self.num_experts if self.enable_moe_block else 0

    @property
    def own_fields(self) -> list[dict[str, int]]:
        """The fields in which each layer differs."""
        if self.per_layer_config is not None:
            stated = {int(layer): own for layer, own in self.per_layer_config.items()}
            return [stated.get(layer, {}) for layer in range(self.num_hidden_layers)]
        full = {"head_dim": self.global_head_dim}
        if self.num_global_key_value_heads and self.attention_k_eq_v:
            full["num_key_value_heads"] = self.num_global_key_value_heads
        return [full if kind == "full_attention" else {} for kind in self.kinds]

    def keys_are_values(self, layer: int) -> bool:
        """See `PerLayerGemmaConfig`."""
        return self.attention_k_eq_v and self.kinds[layer] == "full_attention"

    def check(self, fields: Fields) -> None:
        """See `TextConfig`."""
        super().check(fields)
        for key, own in (self.per_layer_config or {}).items():
            known = isinstance(own, dict) and not own.keys() - {"head_dim", "num_key_value_heads"}
            if not known or not key.isdecimal():
                demand = "must say head_dim and num_key_value_heads of layers, nothing else"
                fields.refuse("per_layer_config", demand)
            inner = fields.inner(f"per_layer_config.{key}", own)
            inner.integer("head_dim", 2, MAX_HEAD_SIZE, optional=True)
            inner.integer("num_key_value_heads", 1, MAX_HEADS, optional=True)
        by_kind: dict[str, dict[str, int]] = {}
        for layer, (kind, own) in enumerate(zip(self.kinds, self.own_fields, strict=True)):
            if kind not in by_kind:
                by_kind[kind], changed = own, cast("dict[str, Any]", own)
                inner = fields.inner(f"per_layer_config.{layer}", {**fields.config, **own})
                replace(self, **changed).check_heads(inner)
            elif by_kind[kind] != own:
                fields.refuse("per_layer_config", "must say the same of all layers of one type")


class Gemma4UnifiedConfig(Gemma4Config):
    """The 12B."""

    max_position_embeddings: int | None = 262144
    sliding_window: int | None = 1024
    hidden_size_per_layer_input: int | None = 0
