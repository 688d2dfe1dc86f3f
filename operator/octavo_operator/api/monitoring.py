# ruff: noqa: RUF009  (spec_field makes a dataclass field)
"""monitoring: metrics for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from octavo_operator.api.common import MAP
from octavo_operator.schema import Rule, spec_field


@dataclass(frozen=True, kw_only=True)
class Monitoring:
    RULES: ClassVar = (
        Rule(
            "self.interval.endsWith('s') ? duration(self.interval) >= duration('1s') : true",
            "monitoring.interval must be at least 1s",
        ),
    )
    enabled: bool = spec_field(
        "Have Prometheus collect the engine's metrics, where its operator is installed.", default=True
    )
    kind: str = spec_field("By which object.", default="PodMonitor", enum=["PodMonitor", "ServiceMonitor"])
    interval: str = spec_field("How often.", default="15s", maxLength=8, pattern="^[0-9]+(s|m)$")
    labels: dict[str, str] = spec_field("Labels by which your Prometheus finds the object.", default={}, **MAP)
