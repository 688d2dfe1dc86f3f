"""Temperatures of decisions, one for each type of question: fitted to questions with known answers. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.chat.decisions.questions import KINDS
from octavo.chat.decisions.wording import VERSION
from octavo.text.shown import shown

LOWEST, HIGHEST = 0.05, 20.0  # of temperatures
_STEPS, _PRECISION, _NUM_BINS = 60, 1e-10, 10

Row = tuple[Sequence[float], int]
"""The log-probabilities of a question's options, and the number of the right one."""


def shares(logprobs: Sequence[float], temperature: float = 1.0) -> list[float]:
    """The options' shares, which sum to 1. One log-probability at least is finite."""
    highest = max(logprobs)
    weights = [math.exp((logprob - highest) / temperature) for logprob in logprobs]
    whole = math.fsum(weights)
    return [weight / whole for weight in weights]


def read_temperatures(data: Any) -> dict[str, float]:
    """The temperatures that a calibration file states, by type of question. Raises ValueError."""
    if not isinstance(data, Mapping) or not isinstance(given := data.get("temperatures"), Mapping):
        raise ValueError('it must be an object with "wording" and "temperatures"')
    if data.get("wording") != VERSION:
        raise ValueError(f"it is for the wording {shown(data.get('wording'))}, and questions are asked in {VERSION!r}")
    for kind, value in given.items():
        if kind not in KINDS:
            raise ValueError(f"temperatures.{kind}: the types of questions are {', '.join(KINDS)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not LOWEST <= value <= HIGHEST:
            raise ValueError(f"temperatures.{kind} must be a number from {LOWEST} to {HIGHEST:g}, got {shown(value)}")
    return {kind: float(value) for kind, value in given.items()}


def calibration_file(temperatures: Mapping[str, float]) -> dict[str, Any]:
    """The contents of a calibration file."""
    return {"wording": VERSION, "temperatures": dict(temperatures)}


def fit_temperature(rows: Sequence[Row]) -> float:
    """The temperature at which the right answers are likeliest, within the limits. By Newton's method on its inverse,
    in which their likelihood has one maximum."""
    low, high, inverse = 1 / HIGHEST, 1 / LOWEST, 1.0
    for _ in range(_STEPS):
        slope = curvature = 0.0
        for logprobs, right in rows:
            own = shares(logprobs, 1 / inverse)
            mean = math.fsum(share * value for share, value in zip(own, logprobs, strict=True))
            slope += mean - logprobs[right]
            curvature += math.fsum(share * (value - mean) ** 2 for share, value in zip(own, logprobs, strict=True))
        low, high = (low, inverse) if slope > 0 else (inverse, high)
        step = inverse - slope / curvature if curvature > 0 else math.inf
        step = step if low < step < high else (low + high) / 2  # outside of what is left: halve it
        if abs(step - inverse) < _PRECISION:
            break
        inverse = step
    return 1 / inverse


def expected_error(rows: Sequence[Row], temperature: float) -> float:
    """The expected calibration error: how far the likeliest option's share is from how often it is right, on average
    over ten bins of shares."""
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(_NUM_BINS)]
    for logprobs, right in rows:
        own = shares(logprobs, temperature)
        top = max(own)
        bins[min(int(top * _NUM_BINS), _NUM_BINS - 1)].append((top, own.index(top) == right))
    gaps = (abs(math.fsum(top - is_right for top, is_right in one)) for one in bins)
    return math.fsum(gaps) / len(rows)
