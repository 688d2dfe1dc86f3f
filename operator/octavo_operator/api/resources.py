# ruff: noqa: RUF009  (spec_field makes a dataclass field)
"""accelerator, resources, shm, scheduling: what a replica gets, and on which nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from octavo_operator import kubernetes_schemas as k8s
from octavo_operator.api.common import MAP, Amount
from octavo_operator.schema import BYTES, QUANTITY, Rule, spec_field

_RESOURCES: dict[str, Any] = {
    "type": "object",
    "maxProperties": 16,
    "additionalProperties": dict(QUANTITY),
}
_WHOLE_BYTES = Rule(
    "!('memory' in self) || type(self['memory']) == int || !self['memory'].matches('[num]$')",
    "resources: memory is counted in bytes, of which m is a thousandth; write 500M or 500Mi, not 500m",
)


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    RULES: ClassVar = (
        Rule(
            "!(has(self.resourceName) && has(self.mig))",
            "accelerator: mig names a resource of its own; leave resourceName out",
        ),
    )
    resource_name: str | None = spec_field(
        "Resource that the device plugin offers; absent: nvidia.com/gpu.",
        default=None,
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        maxLength=317,
    )
    mig: str | None = spec_field(
        "Slice of a GPU, such as 1g.10gb: nvidia.com/mig-1g.10gb.", default=None, pattern=r"^[0-9]+g\.[0-9]+gb(\.me)?$"
    )
    count: int = spec_field("How many a replica gets.", default=1, minimum=1, maximum=16)

    @property
    def resource(self) -> str:
        if self.mig:
            return f"nvidia.com/mig-{self.mig}"
        return self.resource_name or "nvidia.com/gpu"


@dataclass(frozen=True, kw_only=True)
class Resources:
    requests: dict[str, Amount] = spec_field(
        "What the scheduler sets aside for a replica, such as cpu: 2, memory: 4Gi.",
        default={},
        override=_RESOURCES,
        rules=(_WHOLE_BYTES,),
    )
    limits: dict[str, Amount] = spec_field(
        "What a replica may use at most. The engine sizes threads and caches by them.",
        default={},
        override=_RESOURCES,
        rules=(_WHOLE_BYTES,),
    )


@dataclass(frozen=True, kw_only=True)
class Shm:
    size: Amount = spec_field(
        "Size of /dev/shm; what is written there counts as memory.",
        default="256Mi",
        override={**BYTES, "default": "256Mi"},
    )


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    node_selector: dict[str, str] = spec_field("Labels that a node must have.", default={}, **MAP)
    affinity: dict[str, Any] | None = spec_field("Kubernetes' own affinity rules.", default=None, override=k8s.AFFINITY)
    tolerations: tuple[dict, ...] = spec_field(  # type: ignore[type-arg]
        "Taints that are tolerated. That of the accelerator is tolerated anyway.",
        default=(),
        maxItems=32,
        items_schema=k8s.TOLERATION,
    )
    topology_spread_constraints: tuple[dict, ...] = spec_field(  # type: ignore[type-arg]
        "How replicas are spread over nodes or zones; the label selector is filled in.",
        default=(),
        maxItems=8,
        items_schema=k8s.TOPOLOGY_SPREAD,
    )
    priority_class_name: str | None = spec_field("Priority class of the pods.", default=None, maxLength=253)
    runtime_class_name: str | None = spec_field(
        "Runtime class of the pods; absent: the node's default.", default=None, maxLength=253
    )
    scheduler_name: str | None = spec_field(
        "Scheduler to use; absent: the cluster's default.", default=None, maxLength=253
    )
