# ruff: noqa: RUF009  (spec_field makes a dataclass field)
"""lifecycle, probes: startup, health and termination of a pod."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from octavo_operator.api.schema import Rule, spec_field


@dataclass(frozen=True, kw_only=True)
class Lifecycle:
    """`spec.lifecycle`: graceful termination."""

    RULES: ClassVar = (
        Rule(
            "!has(self.terminationGracePeriodSeconds) || self.terminationGracePeriodSeconds > self.preStopSeconds + "
            "self.drainSeconds",
            "lifecycle.terminationGracePeriodSeconds must be above preStopSeconds + drainSeconds, or requests would "
            "be cut off; leave it out to have it computed",
        ),
    )
    pre_stop_seconds: int = spec_field(
        "Seconds that a terminating pod still takes requests, until endpoints are updated.",
        default=10,
        minimum=0,
        maximum=600,
    )
    drain_seconds: int = spec_field(
        "Seconds that running requests then have to finish.", default=60, minimum=0, maximum=86400
    )
    termination_grace_period_seconds: int | None = spec_field(
        "Seconds until a terminating pod is killed. Default: preStopSeconds + drainSeconds + 10.",
        default=None,
        minimum=1,
        maximum=90000,
    )

    @property
    def grace_seconds(self) -> int:
        """terminationGracePeriodSeconds of the pods."""
        return self.termination_grace_period_seconds or self.pre_stop_seconds + self.drain_seconds + 10


@dataclass(frozen=True, kw_only=True)
class StartupProbe:
    """`spec.probes.startup`."""

    budget_seconds: int = spec_field(
        "Seconds that loading the model may take before the container is restarted.",
        default=600,
        minimum=10,
        maximum=86400,
    )
    period_seconds: int = spec_field("Seconds between probes.", default=2, minimum=1, maximum=60)


@dataclass(frozen=True, kw_only=True)
class ReadinessProbe:
    """`spec.probes.readiness`."""

    period_seconds: int = spec_field("Seconds between probes.", default=2, minimum=1, maximum=60)
    failure_threshold: int = spec_field(
        "Failures after which the pod gets no more requests.", default=2, minimum=1, maximum=100
    )
    timeout_seconds: int = spec_field("Timeout in seconds.", default=2, minimum=1, maximum=60)


@dataclass(frozen=True, kw_only=True)
class LivenessProbe:
    """`spec.probes.liveness`."""

    period_seconds: int = spec_field("Seconds between probes.", default=10, minimum=1, maximum=300)
    failure_threshold: int = spec_field(
        "Failures after which the container is restarted.", default=3, minimum=1, maximum=100
    )
    timeout_seconds: int = spec_field("Timeout in seconds.", default=5, minimum=1, maximum=60)


@dataclass(frozen=True, kw_only=True)
class Probes:
    """`spec.probes`: probes of the engine container."""

    startup: StartupProbe = spec_field("Startup probe: whether the model is loaded.", default=StartupProbe)
    readiness: ReadinessProbe = spec_field("Readiness probe: whether the pod takes requests.", default=ReadinessProbe)
    liveness: LivenessProbe = spec_field(
        "Liveness probe: whether the engine makes progress, independent of load.", default=LivenessProbe
    )
