"""EmbeddingGemma."""

from __future__ import annotations

from typing import ClassVar

from octavo.interface.config_checks import Fields
from octavo.interface.model_config.gemma import Gemma3Config


class Gemma3TextConfig(Gemma3Config):
    """Gemma 3 that reads to both sides. ``sliding_window`` counts the tokens of both sides."""

    overflows_float16: ClassVar[bool] = True
    reads_to_both_sides: ClassVar[bool] = True

    def window(self, layer: int) -> int | None:
        """See `TextConfig`: of one side, the token itself among them. An odd number is that already, as versions of
        transformers wrote it that halved it on reading and did not double it on writing."""
        both = super().window(layer)
        return both if both is None or both % 2 else both // 2 + 1

    def check(self, fields: Fields) -> None:
        """See `TextConfig`."""
        super().check(fields)
        if self.use_bidirectional_attention is not True:
            raise fields.error(
                "Gemma3TextModel is an encoder here, and use_bidirectional_attention is not true; for a model that "
                'writes text give --hf-overrides \'{"architectures": ["Gemma3ForCausalLM"]}\''
            )
