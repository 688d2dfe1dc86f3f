"""One LLMDeployment, parsed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo_operator.api.common import KIND, OWNER_LABEL, RESTARTED_AT, InvalidOwner, Owner, identity
from octavo_operator.api.schema import from_json
from octavo_operator.api.spec import LLMDeploymentSpec


@dataclass(frozen=True)
class LLMDeployment(Owner):
    """One object of the API, with its spec parsed."""

    kind, label = KIND, OWNER_LABEL

    spec: LLMDeploymentSpec
    deleting: bool = False
    restarted_at: str | None = None  # by the annotation RESTARTED_AT
    created: str = ""  # timestamp

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LLMDeployment:
        """Parse an object of the API. Raises SpecError for a spec that does not fit the CRD's types."""
        meta = data["metadata"]
        return cls(
            *identity(data),
            from_json(LLMDeploymentSpec, data.get("spec") or {}, "spec"),
            "deletionTimestamp" in meta,
            (meta.get("annotations") or {}).get(RESTARTED_AT) or None,
            meta.get("creationTimestamp") or "",
        )

    @functools.cached_property
    def served_names(self) -> list[str]:
        """Model names in requests."""
        return [self.spec.model.name or self.name, *self.spec.model.aliases]

    @property
    def replicas(self) -> int:
        """Desired number of pods."""
        return 0 if self.spec.suspend else self.scaled_replicas

    @property
    def scaled_replicas(self) -> int:
        """spec.replicas within the limits of autoscaling; 0 stays 0, as with a HorizontalPodAutoscaler."""
        limits = self.spec.autoscaling
        if limits is None or self.spec.replicas == 0:
            return self.spec.replicas
        return min(max(self.spec.replicas, limits.min_replicas), limits.max_replicas)

    @property
    def scales_to_zero(self) -> bool:
        """True if it has no replica while nobody asks for anything, if somebody holds requests: routers of its own, or
        a gateway's."""
        autoscaling = self.spec.autoscaling
        return autoscaling is not None and autoscaling.min_replicas == 0

    @property
    def routers_hold(self) -> bool:
        """True if it has routers that hold requests while it has no replica."""
        return self.scales_to_zero and self.spec.routing.routers is not None

    @property
    def is_woken_by_requests(self) -> bool:
        """True if it is at zero, and a request brings it back."""
        return self.scales_to_zero and self.spec.replicas == 0 and not self.spec.suspend


@dataclass(frozen=True)
class InvalidLLMDeployment(InvalidOwner):
    """An LLMDeployment whose stored spec does not parse by the CRD's current rules."""

    kind, label = KIND, OWNER_LABEL
