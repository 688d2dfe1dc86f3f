"""Rotary position embedding (Su et al., 2021) and the ways to stretch it to longer contexts.

config.json says it in one of two ways: ``rope_theta`` and ``rope_scaling`` beside each other, or both in
``rope_parameters``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import ModelError
from octavo.interface.engine_config import ModelConfig


class RotaryEmbedding(nn.Module):
    """``cos_sin_cache`` float32 [max_model_len, size]: row p holds the cosines, then the sines of position p.

    ``size`` leading elements of a head are turned (None: all of them). ``parameters``: config.json's, unless given.
    ``scale`` is what cosines and sines are multiplied by (YaRN, LongRoPE).
    """

    cos_sin_cache: Tensor

    def __init__(self, config: ModelConfig, size: int | None = None, parameters: dict[str, Any] | None = None) -> None:
        super().__init__()
        size = config.head_size if size is None else size
        parameters = config.text.rope() if parameters is None else parameters
        rope_type = parameters["rope_type"]
        if rope_type not in _SCALINGS:
            raise ModelError(f"config.json asks for rope_type {rope_type!r}; known are {', '.join(_SCALINGS)}")
        parameters["max_model_len"] = config.max_model_len
        try:
            inv_freq, self.scale = _SCALINGS[rope_type](_inverse_frequencies(parameters, size), parameters)
        except KeyError as error:
            raise ModelError(
                f"config.json's rope parameters of type {rope_type!r} lack {error}; correct the file or fetch "
                "the model again"
            ) from None
        if torch.get_default_device().type == "meta":  # a table of its size, for who wants to know no more
            table = torch.empty(config.max_model_len, size, dtype=torch.float32)
            self.register_buffer("cos_sin_cache", table, persistent=False)
            return
        # Computed on the CPU whatever the device is, so that every platform turns by the same angles.
        angles = torch.arange(config.max_model_len, dtype=torch.float32, device="cpu")[:, None] * inv_freq
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * self.scale
        self.register_buffer("cos_sin_cache", table.to(torch.get_default_device()), persistent=False)


def rotary_size(config: ModelConfig) -> int:
    """The number of a head's leading elements that are rotated, for families with ``partial_rotary_factor``. Raises
    ModelError if they are no pairs."""
    factor = config.text.rope()["partial_rotary_factor"]
    size = int(config.head_size * factor) if _is_positive(factor) else 0
    if size < 2 or size % 2 or size > config.head_size:
        raise ModelError(
            f"config.json: partial_rotary_factor ({factor!r}) of heads of {config.head_size} is {size} elements, which "
            "are not pairs within a head; correct the file or fetch the model again"
        )
    return size


def _inverse_frequencies(parameters: dict[str, Any], head_size: int) -> Tensor:
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device="cpu") / head_size
    powers: Tensor = parameters["rope_theta"] ** exponents
    return 1.0 / powers


def _default(inv_freq: Tensor, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    return inv_freq, 1.0


def _linear(inv_freq: Tensor, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    """Positions divided by ``factor`` (position interpolation, Chen et al., 2023)."""
    return inv_freq / parameters["factor"], 1.0


def _ntk(inv_freq: Tensor, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    """GTE's: turns are slower by ``factor`` in all, the fast ones least (NTK scaling of a given factor)."""
    if "mixed_b" in parameters:
        raise ModelError("config.json's rope parameters have mixed_b, which is not supported")
    factor, dim = parameters["factor"], 2 * len(inv_freq)
    frequencies = _inverse_frequencies({"rope_theta": parameters["rope_theta"] * factor}, dim)
    return frequencies / factor ** (2 / dim), 1.0


def _llama3(inv_freq: Tensor, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    """Llama 3.1: slow turns (long waves) are stretched by ``factor``, fast ones kept, those between blended."""
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = original / (2 * math.pi / inv_freq)  # within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    blended = (1 - keep) * inv_freq / factor + keep * inv_freq
    return torch.where(turns < low, inv_freq / factor, torch.where(turns > high, inv_freq, blended)), 1.0


def _yarn(inv_freq: Tensor, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023): as llama3 but blended by dimension, and cosines and sines scaled up a little."""
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    base, dim = parameters["rope_theta"], 2 * len(inv_freq)

    def dimension_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(parameters.get("beta_fast", 32)), dimension_of(parameters.get("beta_slow", 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)
    stretched = ramp.clamp(0, 1)
    scaled = inv_freq / factor * stretched + inv_freq * (1 - stretched)

    def attention(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if "attention_factor" in parameters:
        return scaled, parameters["attention_factor"]
    if mscale and mscale_all_dim:
        return scaled, attention(mscale) / attention(mscale_all_dim)
    return scaled, attention(1.0)


def _dynamic(inv_freq: Tensor, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    """NTK scaling: a base that grows with the length beyond the original one; here that of the longest sequence."""
    factor, original = parameters["factor"], parameters["max_position_embeddings"]
    length, dim = max(parameters["max_model_len"], original), 2 * len(inv_freq)
    if dim == 2:  # a single pair has no slower one
        return inv_freq, 1.0
    growth = (factor * length / original - (factor - 1)) ** (dim / (dim - 2))
    return _inverse_frequencies({"rope_theta": parameters["rope_theta"] * growth}, dim), 1.0


def _longrope(inv_freq: Tensor, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al., 2024): divisors of each frequency, one list for up to the original context and one for
    more. Which one is decided by the longest sequence, so that keys in the cache fit all later queries."""
    original = parameters["original_max_position_embeddings"]
    name = "long_factor" if parameters["max_model_len"] > original else "short_factor"
    divisors = parameters[name]
    if not isinstance(divisors, list) or len(divisors) != len(inv_freq) or not all(_is_positive(d) for d in divisors):
        raise ModelError(
            f"config.json: {name} must be a list of {len(inv_freq)} positive numbers, one for each pair of elements; "
            "correct the file or fetch the model again"
        )
    factor = parameters.get("factor") or parameters["max_position_embeddings"] / original
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    scale = parameters.get("attention_factor", usual)
    return inv_freq / torch.tensor(divisors, dtype=torch.float32, device="cpu"), scale


def _proportional(inv_freq: Tensor, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    """Gemma 4: the first part of the pairs of a head are turned, as fast as if all were."""
    part = parameters.get("partial_rotary_factor", 1.0)
    if isinstance(part, bool) or not isinstance(part, (int, float)) or not 0 <= part <= 1:
        raise ModelError(
            f"config.json: partial_rotary_factor must be a number from 0 to 1, got {part!r}; correct the file or fetch "
            "the model again"
        )
    turned = int(part * 2 * len(inv_freq) // 2)
    kept = torch.arange(len(inv_freq), device="cpu") < turned
    return torch.where(kept, inv_freq / parameters.get("factor", 1.0), 0.0), 1.0


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


_SCALINGS: dict[str, Callable[[Tensor, dict[str, Any]], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "ntk": _ntk,
    "llama3": _llama3,
    "yarn": _yarn,
    "dynamic": _dynamic,
    "longrope": _longrope,
    "proportional": _proportional,
    "mrope": _default,  # of text, whose positions in time, height and width are one
    "su": _longrope,  # its first name
}
