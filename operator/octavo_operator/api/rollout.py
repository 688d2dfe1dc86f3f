"""rollout, podDisruptionBudget: replacement and eviction of pods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from octavo_operator.api.common import INT_OR_PERCENT
from octavo_operator.api.schema import Rule, spec_field


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """`spec.rollout`: how pods are replaced."""

    RULES: ClassVar = (
        Rule(
            "self.type == 'RollingUpdate' || (!has(self.maxSurge) && !has(self.maxUnavailable))",
            "rollout.maxSurge and rollout.maxUnavailable need rollout.type RollingUpdate",
        ),
        Rule(
            "!(has(self.maxSurge) && has(self.maxUnavailable) && string(self.maxSurge) in ['0', '0%'] && "
            "string(self.maxUnavailable) in ['0', '0%'])",
            "rollout.maxSurge and rollout.maxUnavailable cannot both be 0: no pod could ever be replaced",
        ),
        Rule(
            "!has(self.progressDeadlineSeconds) || self.progressDeadlineSeconds > self.minReadySeconds",
            "rollout.progressDeadlineSeconds must be above rollout.minReadySeconds",
        ),
    )
    type: str = spec_field(
        (
            "Replacement of pods. Auto: a new pod is created first; when it cannot be scheduled (all GPUs "
            "are in use), an old pod is stopped. RollingUpdate: by maxSurge and maxUnavailable. Recreate: "
            "all old pods are stopped first."
        ),
        default="Auto",
        enum=["Auto", "RollingUpdate", "Recreate"],
    )
    max_surge: int | str | None = spec_field(
        "Maximum number or percentage of pods above replicas.", default=None, override=INT_OR_PERCENT
    )
    max_unavailable: int | str | None = spec_field(
        "Maximum number or percentage of pods below replicas.", default=None, override=INT_OR_PERCENT
    )
    surge_patience_seconds: int = spec_field(
        "Seconds that the new pod may be unschedulable before an old one is stopped, with type Auto. 0: an old one "
        "is stopped first.",
        default=60,
        minimum=0,
        maximum=86400,
    )
    progress_deadline_seconds: int | None = spec_field(
        "Seconds without progress after which a rollout is reported as failed. Default: the startup budget, an hour "
        "for fetching and ten minutes.",
        default=None,
        minimum=1,
        maximum=604800,
    )
    min_ready_seconds: int = spec_field(
        "Seconds that a new pod must be ready before it counts as available.", default=0, minimum=0, maximum=3600
    )


@dataclass(frozen=True, kw_only=True)
class PodDisruptionBudget:
    """`spec.podDisruptionBudget`."""

    RULES: ClassVar = (
        Rule(
            "!(has(self.minAvailable) && has(self.maxUnavailable))",
            "podDisruptionBudget: give minAvailable or maxUnavailable, not both",
        ),
    )
    enabled: bool = spec_field("Create a PodDisruptionBudget.", default=True)
    min_available: int | str | None = spec_field(
        "Minimum number or percentage of available pods.", default=None, override=INT_OR_PERCENT
    )
    max_unavailable: int | str | None = spec_field(
        "Maximum number or percentage of evicted pods. Default, without minAvailable: 1.",
        default=None,
        override=INT_OR_PERCENT,
    )
