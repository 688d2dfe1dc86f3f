# ruff: noqa: RUF009  (spec_field makes a dataclass field)
"""autoscaling: how many replicas there are, by the requests that wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from octavo_operator import kubernetes_schemas as k8s
from octavo_operator.schema import Rule, spec_field


@dataclass(frozen=True, kw_only=True)
class QueueDepth:
    target_per_replica: int = spec_field(
        "Requests that may wait for each replica before another one is added.", default=4, minimum=1, maximum=100000
    )


@dataclass(frozen=True, kw_only=True)
class Autoscaling:
    RULES: ClassVar = (
        Rule(
            "self.minReplicas <= self.maxReplicas",
            "autoscaling.minReplicas must not be above autoscaling.maxReplicas",
        ),
    )
    min_replicas: int = spec_field("So many stay when there is nothing to do.", default=1, minimum=1, maximum=1000)
    max_replicas: int = spec_field("More there never are.", minimum=1, maximum=1000)
    queue_depth: QueueDepth = spec_field("When a replica is added.", default=QueueDepth)
    behavior: dict[str, Any] | None = spec_field(
        "How fast, as in a HorizontalPodAutoscaler; absent: up at once, down after five minutes.",
        default=None,
        override=k8s.SCALING_BEHAVIOR,
    )
    provider: str = spec_field(
        "Who scales. hpa: a HorizontalPodAutoscaler that asks this operator. keda: a ScaledObject, where KEDA is "
        "installed.",
        default="hpa",
        enum=["hpa", "keda"],
    )
