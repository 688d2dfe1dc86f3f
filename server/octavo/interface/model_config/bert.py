"""BERT, RoBERTa, XLM-R and DistilBERT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from octavo.interface.config_checks import MAX_POSITIONS
from octavo.interface.model_config.declarations import choice, integer
from octavo.interface.model_config.encoder import EncoderConfig


class BertConfig(EncoderConfig):
    """Learned positions."""

    is_rotary: ClassVar[bool] = False

    max_position_embeddings: int = integer(1, MAX_POSITIONS)
    position_embedding_type: str = choice(("absolute",), "absolute", 'must be "absolute"')

    @property
    def first_position(self) -> int:
        """The row of a text's first token in the table of positions."""
        return 0


class RobertaConfig(BertConfig):
    """Positions are counted from behind the padding token's."""

    pad_token_id: int = 1

    @property
    def first_position(self) -> int:
        """See `BertConfig`."""
        return self.pad_token_id + 1

    @property
    def num_positions(self) -> int:
        """See `TextConfig`."""
        return max(1, self.max_position_embeddings - self.first_position)


class XLMRobertaConfig(RobertaConfig):
    """Fields of XLM-RoBERTa."""


class DistilBertConfig(BertConfig):
    """Fields of DistilBERT: other names, and no token types."""

    aliases: ClassVar[Mapping[str, str]] = {
        "dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
        "activation": "hidden_act",
    }

    type_vocab_size: int = 0
