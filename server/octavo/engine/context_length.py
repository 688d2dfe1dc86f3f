"""The longest that a prompt and its answer may be together, by the arguments and the model's positions."""

from __future__ import annotations

import logging
import os
from typing import Any

from octavo.errors import ConfigError
from octavo.interface.config_checks import MAX_POSITIONS, shown_value
from octavo.interface.model_config.text import TextConfig

logger = logging.getLogger(__name__)

FITTING_LENGTHS = (None, "auto", -1)  # as many as the model has positions and the memory has room for
_STRETCHING = ("linear", "dynamic", "ntk")  # of the others config.json gives the stretched number, or says its own
ALLOWING = ("OCTAVO_ALLOW_LONG_MAX_MODEL_LEN", "VLLM_ALLOW_LONG_MAX_MODEL_LEN")


def context_length(given: int | str | None, text: TextConfig) -> int:
    """Tokens of prompt and answer, for ``max_model_len`` as it was ``given``. Raises ConfigError for more than the
    model has positions for, unless the environment allows it: then answers beyond them may be nonsense."""
    own = own_length(text)
    if given in FITTING_LENGTHS:
        return own  # lowered by the worker once it knows the memory
    asked = int(given)
    if asked < 1:
        raise ConfigError(f"max_model_len must be at least 1, got {asked}")
    if asked > MAX_POSITIONS:
        raise ConfigError(f"max_model_len must be at most {MAX_POSITIONS}, got {shown_value(asked)}")
    longest = _longest(text, own)
    if asked <= longest:
        return asked
    above = f"max_model_len {asked} is above the model's {longest} positions (max_position_embeddings)"
    if not text.is_rotary:
        raise ConfigError(f"{above}, and its table of positions has no more; lower it")
    if not any(os.environ.get(name, "").lower() in ("1", "true") for name in ALLOWING):
        raise ConfigError(
            f"{above}; lower it, give rope_scaling if the model is made for that, or set {ALLOWING[0]}=1 in the "
            "environment, after which longer texts may be answered with nonsense"
        )
    logger.warning("%s: longer texts may be answered with nonsense", above)
    return asked


def own_length(text: TextConfig) -> int:
    """Tokens that the model is made for: its positions, or those that YaRN stretches its original ones to."""
    positions = text.num_positions or 2048
    rope = _stated(text)
    if rope.get("rope_type", rope.get("type")) != "yarn":
        return positions
    original = rope.get("original_max_position_embeddings") or text.original_max_position_embeddings or positions
    return max(positions, int(original * rope.get("factor", 1)))


def _longest(text: TextConfig, own: int) -> int:
    rope = _stated(text)
    factor = rope.get("factor", 1) if rope.get("rope_type", rope.get("type")) in _STRETCHING else 1
    return min(MAX_POSITIONS, max(own, int(own * factor)))


def _stated(text: TextConfig) -> dict[str, Any]:
    return (text.rope_scaling or text.rope_parameters or {}) if text.is_rotary else {}
