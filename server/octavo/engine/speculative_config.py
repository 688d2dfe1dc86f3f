"""``speculative_config``, vLLM's name and keys: which tokens are guessed ahead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from octavo.errors import ConfigError
from octavo.interface.engine_config import SpeculativeConfig
from octavo.system.suggestions import did_you_mean

METHODS = ("none", "ngram")
MAX_SPECULATIVE_TOKENS = 64
MAX_LOOKUP = 64


def parse_speculative_config(values: Any) -> SpeculativeConfig:
    """Check a JSON object as it was given; None: no speculation. Raises ConfigError."""
    if values is None:
        return SpeculativeConfig()
    if not isinstance(values, Mapping):
        raise ConfigError(f"speculative_config must be a JSON object, got {values!r}")
    values = {name: value for name, value in values.items() if value is not None}
    known = [field.name for field in fields(SpeculativeConfig)]
    for name in values:
        if name not in known:
            near = did_you_mean(str(name), known)
            raise ConfigError(f"speculative_config has no key {name!r}{near or '; it has ' + ', '.join(known)}")
    method = values.get("method")
    if method not in METHODS:
        what = "needs a method" if method is None else f"method {method!r} is not there"
        raise ConfigError(f"speculative_config: {what}; there are {' and '.join(METHODS)}")
    if method == "none":
        return SpeculativeConfig()
    if "num_speculative_tokens" not in values:
        raise ConfigError("speculative_config needs num_speculative_tokens, 4 for a start")
    for name, most in (
        ("num_speculative_tokens", MAX_SPECULATIVE_TOKENS),
        ("prompt_lookup_max", MAX_LOOKUP),
        ("prompt_lookup_min", MAX_LOOKUP),
    ):
        _check(name, values.get(name, 1), most)
    shortest, longest = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
    if shortest is None and longest is None:
        return SpeculativeConfig(**values)
    values["prompt_lookup_min"] = shortest if shortest is not None else longest
    values["prompt_lookup_max"] = longest if longest is not None else shortest
    if values["prompt_lookup_min"] > values["prompt_lookup_max"]:
        raise ConfigError(f"speculative_config: prompt_lookup_min {shortest} is above prompt_lookup_max {longest}")
    return SpeculativeConfig(**values)


def _check(name: str, value: Any, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"speculative_config: {name} must be an integer from 1 to {most}, got {value!r}")
