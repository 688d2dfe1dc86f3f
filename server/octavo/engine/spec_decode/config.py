"""``speculative_config``, vLLM's name and keys: which tokens are guessed ahead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from octavo.errors import ConfigError
from octavo.interface.engine_config import HEAD_METHODS, SpeculativeConfig
from octavo.interface.quantizations import QUANTIZATIONS
from octavo.system.suggestions import did_you_mean

MAX_SPECULATIVE_TOKENS = 64
MAX_LOOKUP = 64


class _Number(NamedTuple):
    least: float
    most: float
    is_integer: bool = True


_LOOKUP = {name: _Number(1, MAX_LOOKUP) for name in ("prompt_lookup_max", "prompt_lookup_min")}
_SUFFIX = {
    "suffix_decoding_max_tree_depth": _Number(2, MAX_LOOKUP),
    "suffix_decoding_max_cached_requests": _Number(0, 1_000_000),
    "suffix_decoding_max_spec_factor": _Number(0.1, 64, is_integer=False),
    "suffix_decoding_min_token_prob": _Number(0, 1, is_integer=False),
}
# The keys of each method besides num_speculative_tokens, and their limits.
_DRAFT = {"draft_tensor_parallel_size": _Number(1, 1)}
METHODS: dict[str, dict[str, _Number]] = {
    "none": {},
    "ngram": _LOOKUP,
    "suffix": _SUFFIX,
    "draft_model": _DRAFT,
    "mtp": {},
    **dict.fromkeys(HEAD_METHODS, _DRAFT),
}
# vLLM's names for it by the model.
_ALIASES = dict.fromkeys(("deepseek_mtp", "glm4_moe_mtp", "qwen3_5_mtp"), "mtp")
# Fields of methods that have a model; as the flags of the same names.
_OF_MODEL = ("model", "revision", "quantization")
_WITH_MODEL = {
    "draft_model": "a small one with the same tokenizer",
    **dict.fromkeys(HEAD_METHODS, "a draft head that was trained for the model"),
}


def parse_speculative_config(values: Any) -> SpeculativeConfig:
    """Check a JSON object as it was given; None: as the device suggests. Raises ConfigError."""
    if values is None:
        return SpeculativeConfig("auto")
    if not isinstance(values, Mapping):
        raise ConfigError(f"speculative_config must be a JSON object, got {values!r}")
    values = {name: value for name, value in values.items() if value is not None}
    keys = [field.name for field in fields(SpeculativeConfig) if field.name != "draft"]
    for name in values:
        if name not in keys:
            near = did_you_mean(str(name), keys)
            raise ConfigError(f"speculative_config has no key {name!r}{near or '; it has ' + ', '.join(keys)}")
    method = values.get("method", "draft_model" if "model" in values else None)
    method = _ALIASES.get(method, method) if isinstance(method, str) else method
    if method not in METHODS:
        what = "needs a method" if method is None else f"method {method!r} is not there"
        raise ConfigError(f"speculative_config: {what}; there are {', '.join(METHODS)}")
    if method == "none":
        return SpeculativeConfig()
    _check_keys(method, values)
    if method == "suffix":  # vLLM's default
        depth = values.get("suffix_decoding_max_tree_depth", SpeculativeConfig.suffix_decoding_max_tree_depth)
        values.setdefault("num_speculative_tokens", depth)
    if method == "mtp":
        values.setdefault("num_speculative_tokens", 0)  # as many as there are layers, as vLLM: each is trained for one
    if "num_speculative_tokens" not in values:
        raise ConfigError("speculative_config needs num_speculative_tokens, 4 for a start")
    _check_model(method, values)
    _complete_lookup(values)
    return SpeculativeConfig(**{**values, "method": method})


def _check_keys(method: str, values: Mapping[str, Any]) -> None:
    numbers = {"num_speculative_tokens": _Number(1, MAX_SPECULATIVE_TOKENS), **METHODS[method]}
    for name, value in values.items():
        if name in numbers:
            _check(name, value, numbers[name])
        elif name != "method" and not (method in _WITH_MODEL and name in _OF_MODEL):
            raise ConfigError(f"speculative_config: {name} is not of method {method}, which has {', '.join(numbers)}")


def _check_model(method: str, values: Mapping[str, Any]) -> None:
    if method not in _WITH_MODEL:
        return
    for name in _OF_MODEL:
        if not isinstance(values.get(name, ""), str):
            raise ConfigError(f"speculative_config: {name} must be a text, got {values[name]!r}")
    if not values.get("model"):
        raise ConfigError(f"speculative_config: method {method} needs a model, {_WITH_MODEL[method]}")
    if values.get("quantization", "none") not in QUANTIZATIONS:
        known = ", ".join(QUANTIZATIONS)
        raise ConfigError(f"speculative_config: quantization must be one of {known}, got {values['quantization']!r}")


def _complete_lookup(values: dict[str, Any]) -> None:
    """One of the two lengths alone sets both."""
    shortest, longest = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
    if shortest is None and longest is None:
        return
    values["prompt_lookup_min"] = shortest if shortest is not None else longest
    values["prompt_lookup_max"] = longest if longest is not None else shortest
    if values["prompt_lookup_min"] > values["prompt_lookup_max"]:
        raise ConfigError(f"speculative_config: prompt_lookup_min {shortest} is above prompt_lookup_max {longest}")


def _check(name: str, value: Any, number: _Number) -> None:
    kinds = int if number.is_integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not number.least <= value <= number.most:
        kind = "an integer" if number.is_integer else "a number"
        raise ConfigError(
            f"speculative_config: {name} must be {kind} from {number.least:g} to {number.most:g}, got {value!r}"
        )
