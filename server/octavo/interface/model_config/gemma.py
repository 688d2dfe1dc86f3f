"""Gemma 1, 2 and 3 (text)."""

from __future__ import annotations

from typing import Any, ClassVar

from octavo.interface.config_checks import MAX_FACTOR, MAX_LAYERS, MAX_WIDTH, MAX_WINDOW, Fields
from octavo.interface.model_config.declarations import declare, integer, number, text
from octavo.interface.model_config.text import TextConfig


class GemmaConfig(TextConfig):
    """Fields of Gemma. In the first configurations, gelu in ``hidden_act`` means its approximation by tanh."""

    head_dim: int | None = 256
    tie_word_embeddings: bool = True
    hidden_act: str = "gelu_pytorch_tanh"
    hidden_activation: str | None = text(None)
    reads_to_both_sides: ClassVar[bool] = False
    use_bidirectional_attention: Any = declare(lambda fields, key: fields.config[key], None)

    @property
    def act(self) -> str:
        """The activation of MLPs."""
        return self.hidden_activation or ("gelu_pytorch_tanh" if self.hidden_act == "gelu" else self.hidden_act)

    def check(self, fields: Fields) -> None:
        """See `TextConfig`."""
        super().check(fields)
        if not self.reads_to_both_sides and self.use_bidirectional_attention not in (None, False, "vision"):  # images'
            raise fields.error(
                "use_bidirectional_attention makes it an encoder, and of Gemma's only Gemma3TextModel is built as one"
            )


class WindowedGemmaConfig(GemmaConfig):
    """Windows in all layers but every ``sliding_window_pattern``-th."""

    hidden_activation: str | None = "gelu_pytorch_tanh"
    query_pre_attn_scalar: float = number(0.0, MAX_WIDTH, 256, above=True)
    sliding_window: int | None = 4096
    sliding_window_pattern: int = integer(1, MAX_LAYERS, 2)
    attn_logit_softcapping: float | None = number(0.0, MAX_FACTOR, None, above=True, null=True)
    final_logit_softcapping: float | None = number(0.0, MAX_FACTOR, None, above=True, null=True)

    @property
    def kinds(self) -> list[str]:
        """The kind of attention of each layer."""
        count, every = self.num_hidden_layers, self.sliding_window_pattern
        by_default = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(count)]
        return self.layer_types or by_default

    def slides(self, layer: int) -> bool:
        """See `TextConfig`."""
        return self.kinds[layer] == "sliding_attention"

    def check(self, fields: Fields) -> None:
        """See `TextConfig`."""
        super().check(fields)
        if "sliding_attention" in self.kinds and self.sliding_window is None:
            fields.integer("sliding_window", 1, MAX_WINDOW)


class Gemma2Config(WindowedGemmaConfig):
    """Capped scores and logits."""

    num_key_value_heads: int | None = 4
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0


class Gemma3Config(WindowedGemmaConfig):
    """The released config.json of models that read images states of the text what differs from the 4B's."""

    vocab_size: int = 262208
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    max_position_embeddings: int | None = 131072
    sliding_window_pattern: int = 6
    rope_theta: float = 1e6
    rope_local_base_freq: float | None = 10000.0
    mm_tokens_per_image: int = integer(1, MAX_WIDTH, 256)
