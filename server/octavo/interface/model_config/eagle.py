"""Draft heads of EAGLE and EAGLE-3, as `octavo.engine.spec_decode.heads` describes them."""

from __future__ import annotations

from dataclasses import MISSING

from octavo.interface.config_checks import MAX_FACTOR, MAX_VOCAB, MAX_WIDTH
from octavo.interface.model_config.declarations import flag, integer, integers, number
from octavo.interface.model_config.llama import LlamaConfig
from octavo.interface.model_config.qwen3 import Qwen3Config


class EagleConfig(LlamaConfig):
    """Fields of EAGLE."""

    own_embedding: bool = flag(False)  # whether the checkpoint has a table of tokens, a head, a bias, a map of tokens
    own_head: bool = flag(False)
    fc_bias: bool = flag(False)
    maps_tokens: bool = flag(False)
    draft_vocab_size: int = integer(1, MAX_VOCAB)
    logit_scale: float = number(0.0, MAX_FACTOR, 1.0, above=True)


class Eagle3Config(EagleConfig):
    """Fields of EAGLE-3; ``taps``: layers of the target whose inputs the head reads."""

    taps: list[int] = integers("must be a list of numbers of layers", MISSING)
    target_hidden_size: int = integer(1, MAX_WIDTH)
    norm_before_residual: bool = flag(False)
    norm_before_fc: bool = flag(False)
    fc_norm: bool = flag(False)
    norm_output: bool = flag(False)


class Eagle3Qwen3Config(Qwen3Config, Eagle3Config):
    """Fields of EAGLE-3, with Qwen3's layers."""
