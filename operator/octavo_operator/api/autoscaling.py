# ruff: noqa: RUF009  (spec_field makes a dataclass field)
"""autoscaling: scaling of replicas on queue depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from octavo_operator.api import kubernetes_schemas as k8s
from octavo_operator.api.schema import Rule, spec_field


@dataclass(frozen=True, kw_only=True)
class QueueDepth:
    """`spec.autoscaling.queueDepth`."""

    target_per_replica: int = spec_field(
        "Target number of waiting requests per replica.", default=4, minimum=1, maximum=100000
    )


@dataclass(frozen=True, kw_only=True)
class Autoscaling:
    """`spec.autoscaling`: a HorizontalPodAutoscaler or ScaledObject on queue depth."""

    RULES: ClassVar = (
        Rule(
            "self.minReplicas <= self.maxReplicas", "autoscaling.minReplicas must not be above autoscaling.maxReplicas"
        ),
    )
    min_replicas: int = spec_field(
        (
            "Minimum number of replicas. 0: scale to zero without requests; it needs routers that hold "
            "requests until the first replica has started (routing.strategy prefix or an LLMGateway), and "
            "counts as 1 otherwise."
        ),
        default=1,
        minimum=0,
        maximum=1000,
    )
    max_replicas: int = spec_field("Maximum number of replicas.", minimum=1, maximum=1000)
    idle_seconds: int = spec_field(
        "Seconds without a request until the last replicas stop, with minReplicas 0.",
        default=600,
        minimum=30,
        maximum=86400,
    )
    queue_depth: QueueDepth = spec_field("Target of the queue depth.", default=QueueDepth)
    behavior: dict[str, Any] | None = spec_field(
        "Scaling behaviour, as of a HorizontalPodAutoscaler. Default: up at once, down after five minutes.",
        default=None,
        override=k8s.SCALING_BEHAVIOR,
    )
    provider: str = spec_field(
        "Autoscaler. hpa: a HorizontalPodAutoscaler with a metric of this operator. keda: a ScaledObject; KEDA must be "
        "installed.",
        default="hpa",
        enum=["hpa", "keda"],
    )
