"""Metrics as objects, for who reads them in the same process: the shapes of vllm.v1.metrics.reader."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Metric:
    """``labels`` tell apart several of one name."""

    name: str
    labels: dict[str, str] = field(kw_only=True)


@dataclass
class Counter(Metric):
    """Only ever grows."""

    value: int


@dataclass
class Gauge(Metric):
    """As it is now."""

    value: float
