"""Build the result of `LLM.get_metrics`, in the shapes of vllm.v1.metrics.reader."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Metric:
    """One value of a metric; ``labels`` distinguish values of the same name."""

    name: str
    labels: dict[str, str] = field(kw_only=True)


@dataclass
class Counter(Metric):
    """A value that only increases."""

    value: int


@dataclass
class Vector(Metric):
    """Values that only increase, one for each position."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A current value."""

    value: float
