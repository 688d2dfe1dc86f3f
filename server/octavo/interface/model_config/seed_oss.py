"""Seed-OSS."""

from __future__ import annotations

from octavo.interface.model_config.declarations import flag
from octavo.interface.model_config.text import TextConfig


class SeedOssConfig(TextConfig):
    """Biases of queries, keys and values, and of what becomes of them."""

    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    attention_bias: bool = True
    attention_out_bias: bool = flag(False)
