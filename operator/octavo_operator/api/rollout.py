"""rollout, podDisruptionBudget: how pods are replaced, and how many may be missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from octavo_operator.api.common import INT_OR_PERCENT
from octavo_operator.schema import Rule, spec_field


@dataclass(frozen=True, kw_only=True)
class Rollout:
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
        "How pods are replaced. Auto: a new pod first, and when none can be scheduled (all GPUs are taken) one old "
        "pod makes room. "
        "RollingUpdate: by maxSurge and maxUnavailable. Recreate: all old pods first.",
        default="Auto",
        enum=["Auto", "RollingUpdate", "Recreate"],
    )
    max_surge: int | str | None = spec_field(
        "Most pods above replicas, a number or percentage.", default=None, override=INT_OR_PERCENT
    )
    max_unavailable: int | str | None = spec_field(
        "Most pods below replicas, a number or percentage.", default=None, override=INT_OR_PERCENT
    )
    surge_patience_seconds: int = spec_field(
        "With type Auto: how long an additional pod may wait for a place before an old one makes room; 0: at once.",
        default=60,
        minimum=0,
        maximum=86400,
    )
    progress_deadline_seconds: int | None = spec_field(
        "A rollout without progress for so long is reported as stuck; absent: the startup budget, and an hour for "
        "fetching, and ten minutes.",
        default=None,
        minimum=1,
        maximum=604800,
    )
    min_ready_seconds: int = spec_field(
        "How long a new pod must be ready to count as available.", default=0, minimum=0, maximum=3600
    )


@dataclass(frozen=True, kw_only=True)
class PodDisruptionBudget:
    RULES: ClassVar = (
        Rule(
            "!(has(self.minAvailable) && has(self.maxUnavailable))",
            "podDisruptionBudget: give minAvailable or maxUnavailable, not both",
        ),
    )
    enabled: bool = spec_field("Limit how many pods a drain of nodes may take at a time.", default=True)
    min_available: int | str | None = spec_field(
        "So many stay, a number or percentage.", default=None, override=INT_OR_PERCENT
    )
    max_unavailable: int | str | None = spec_field(
        "So many may go, a number or percentage; absent, and without minAvailable: 1.",
        default=None,
        override=INT_OR_PERCENT,
    )
