"""Llama, Mistral and Ministral."""

from __future__ import annotations

from octavo.interface.model_config.text import TextConfig


class LlamaConfig(TextConfig):
    """Fields of everything called LlamaForCausalLM."""


class MistralConfig(TextConfig):
    """A window in every layer; null means none."""

    num_key_value_heads: int | None = 8
    sliding_window: int | None = 4096

    def slides(self, layer: int) -> bool:
        """See `TextConfig`: whatever ``layer_types`` says."""
        return True

    @property
    def query_growth(self) -> tuple[int, float] | None:
        """(length, beta) of Ministral 3, which multiplies queries by 1 + beta log(1 + floor(position / length))."""
        rope = self.rope_parameters or self.rope_scaling or {}
        length, beta = rope.get("original_max_position_embeddings"), rope.get("llama_4_scaling_beta")
        return (length, beta) if length and beta else None


class MinistralConfig(TextConfig):
    """A window in the layers that ``layer_types`` names, or in all."""

    num_key_value_heads: int | None = 8
    sliding_window: int | None = 4096

    def slides_by_default(self, layer: int) -> bool:
        """See `TextConfig`."""
        return True
