# ruff: noqa: RUF009  (spec_field makes a dataclass field)
"""monitoring: metrics for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from octavo_operator.api.common import MAP
from octavo_operator.api.schema import Rule, spec_field


@dataclass(frozen=True, kw_only=True)
class Monitoring:
    """`spec.monitoring`: a PodMonitor or ServiceMonitor."""

    RULES: ClassVar = (
        Rule(
            "self.interval.endsWith('s') ? duration(self.interval) >= duration('1s') : true",
            "monitoring.interval must be at least 1s",
        ),
    )
    enabled: bool = spec_field(
        "Create a monitor for Prometheus where the Prometheus operator is installed.", default=True
    )
    kind: str = spec_field("Kind of the monitor.", default="PodMonitor", enum=["PodMonitor", "ServiceMonitor"])
    interval: str = spec_field("Scrape interval.", default="15s", maxLength=8, pattern="^[0-9]+(s|m)$")
    labels: dict[str, str] = spec_field("Labels of the monitor, by which Prometheus selects it.", default={}, **MAP)
