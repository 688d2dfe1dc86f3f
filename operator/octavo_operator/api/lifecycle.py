# ruff: noqa: RUF009  (spec_field makes a dataclass field)
"""lifecycle, probes: how a pod begins, is judged, and ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from octavo_operator.schema import Rule, spec_field


@dataclass(frozen=True, kw_only=True)
class Lifecycle:
    RULES: ClassVar = (
        Rule(
            "!has(self.terminationGracePeriodSeconds) || self.terminationGracePeriodSeconds > self.preStopSeconds + "
            "self.drainSeconds",
            "lifecycle.terminationGracePeriodSeconds must be above preStopSeconds + drainSeconds, or requests would "
            "be cut off; leave it out to have it computed",
        ),
    )
    pre_stop_seconds: int = spec_field(
        "How long a pod that is to go still takes requests, until every client has learnt of it.",
        default=10,
        minimum=0,
        maximum=600,
    )
    drain_seconds: int = spec_field(
        "How long running requests are then given to finish.", default=60, minimum=0, maximum=86400
    )
    termination_grace_period_seconds: int | None = spec_field(
        "When a pod that has not ended is killed; absent: preStopSeconds + drainSeconds + 10.",
        default=None,
        minimum=1,
        maximum=90000,
    )

    @property
    def grace_seconds(self) -> int:
        return self.termination_grace_period_seconds or self.pre_stop_seconds + self.drain_seconds + 10


@dataclass(frozen=True, kw_only=True)
class StartupProbe:
    budget_seconds: int = spec_field(
        "How long loading the model may take before the pod is started anew.", default=600, minimum=10, maximum=86400
    )
    period_seconds: int = spec_field("How often is looked.", default=2, minimum=1, maximum=60)


@dataclass(frozen=True, kw_only=True)
class ReadinessProbe:
    period_seconds: int = spec_field("How often is looked.", default=2, minimum=1, maximum=60)
    failure_threshold: int = spec_field(
        "After how many failures no new requests are sent.", default=2, minimum=1, maximum=100
    )
    timeout_seconds: int = spec_field("How long an answer may take.", default=2, minimum=1, maximum=60)


@dataclass(frozen=True, kw_only=True)
class LivenessProbe:
    period_seconds: int = spec_field("How often is looked.", default=10, minimum=1, maximum=300)
    failure_threshold: int = spec_field(
        "After how many failures the container is started anew.", default=3, minimum=1, maximum=100
    )
    timeout_seconds: int = spec_field("How long an answer may take.", default=5, minimum=1, maximum=60)


@dataclass(frozen=True, kw_only=True)
class Probes:
    startup: StartupProbe = spec_field("Has the model been loaded?", default=StartupProbe)
    readiness: ReadinessProbe = spec_field("Can it take requests?", default=ReadinessProbe)
    liveness: LivenessProbe = spec_field("Does the engine make progress? Never depends on load.", default=LivenessProbe)
