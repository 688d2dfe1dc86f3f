"""Fields of encoders."""

from __future__ import annotations

from typing import Any

from octavo.interface.config_checks import MAX_VOCAB, Fields
from octavo.interface.model_config.declarations import declare, flag, integer, number
from octavo.interface.model_config.text import TextConfig


class EncoderConfig(TextConfig):
    """A model that reads whole texts, to both sides."""

    hidden_act: str = "gelu"
    tie_word_embeddings: bool = True
    layer_norm_eps: float = number(0.0, 1.0, 1e-12)
    type_vocab_size: int = integer(0, MAX_VOCAB, 2)
    pad_token_id: int = integer(0, MAX_VOCAB, 0)
    is_decoder: bool = flag(False)
    has_pooler: bool = flag(True)  # of a classifier; config.json of a GGUF file says where it was left out

    @property
    def num_text_types(self) -> int:
        """See `TextConfig`."""
        return self.type_vocab_size

    def check(self, fields: Fields) -> None:
        """See `TextConfig`."""
        super().check(fields)
        if self.is_decoder:
            raise fields.error("is_decoder makes an encoder a decoder, which is not supported")


def only(value: Any) -> Any:
    """A field of which the authors' code has more than is built here, and released models do not."""

    def read(fields: Fields, key: str) -> Any:
        if (stated := fields.config[key]) != value:
            name = fields.config["architectures"][0]
            raise fields.error(f"{fields.name(key)} is {stated!r:.60}; {name} runs with {value!r} alone")
        return stated

    return declare(read, value)
