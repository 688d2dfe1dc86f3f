"""InternLM 2, 2.5 and 3."""

from __future__ import annotations

from octavo.interface.model_config.declarations import flag
from octavo.interface.model_config.text import TextConfig


class InternLM2Config(TextConfig):
    """One flag for the biases of attention."""

    bias: bool = flag(False)


class InternLM3Config(InternLM2Config):
    """Another one for those of queries, keys and values."""

    qkv_bias: bool = flag(False)
