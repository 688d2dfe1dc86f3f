# ruff: noqa: RUF009  (spec_field makes a dataclass field)
"""accelerator, resources, shm, scheduling: resources and nodes of a replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from octavo_operator.api import kubernetes_schemas as k8s
from octavo_operator.api.common import MAP, Amount
from octavo_operator.api.schema import BYTES, QUANTITY, Rule, spec_field

RESOURCE_MAP: dict[str, Any] = {"type": "object", "maxProperties": 16, "additionalProperties": dict(QUANTITY)}
WHOLE_BYTES = Rule(
    "!('memory' in self) || type(self['memory']) == int || !self['memory'].matches('[num]$')",
    "resources: memory is counted in bytes, of which m is a thousandth; write 500M or 500Mi, not 500m",
)


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """`spec.accelerator`: the extended resource of a GPU, and how many."""

    RULES: ClassVar = (
        Rule(
            "!(has(self.resourceName) && has(self.mig))",
            "accelerator: mig names a resource of its own; leave resourceName out",
        ),
    )
    resource_name: str | None = spec_field(
        "Extended resource of the device plugin. Default: nvidia.com/gpu.",
        default=None,
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        maxLength=317,
    )
    mig: str | None = spec_field(
        "MIG profile, such as 1g.10gb for the resource nvidia.com/mig-1g.10gb.",
        default=None,
        pattern=r"^[0-9]+g\.[0-9]+gb(\.me)?$",
    )
    count: int = spec_field("GPUs per pod.", default=1, minimum=1)

    @property
    def resource(self) -> str:
        """Name of the extended resource."""
        if self.mig:
            return f"nvidia.com/mig-{self.mig}"
        return self.resource_name or "nvidia.com/gpu"


@dataclass(frozen=True, kw_only=True)
class Resources:
    """`spec.resources`: requests and limits of the engine container."""

    RULES: ClassVar = (
        Rule(
            # A value that is no quantity has a message of its own.
            "!has(self.requests) || !has(self.limits) || self.requests.all(name, !(name in self.limits) || "
            "!isQuantity(string(self.requests[name])) || !isQuantity(string(self.limits[name])) || "
            "!quantity(string(self.requests[name])).isGreaterThan(quantity(string(self.limits[name]))))",
            "resources: a request must not be above its limit; lower resources.requests or raise resources.limits",
        ),
    )
    requests: dict[str, Amount] = spec_field(
        "Resources that the scheduler reserves for a replica, such as cpu: 2, memory: 4Gi. The container that fetches "
        "the model requests the same.",
        default={},
        override=RESOURCE_MAP,
        rules=(WHOLE_BYTES,),
    )
    limits: dict[str, Amount] = spec_field(
        "Maximum resources of a replica. The engine sizes its threads and caches accordingly.",
        default={},
        override=RESOURCE_MAP,
        rules=(WHOLE_BYTES,),
    )


@dataclass(frozen=True, kw_only=True)
class Shm:
    """`spec.shm`: the volume at /dev/shm."""

    size: Amount = spec_field(
        "Size of /dev/shm. Its contents count as memory of the container.",
        default="256Mi",
        override={**BYTES, "default": "256Mi"},
    )


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    """`spec.scheduling`: which nodes run the pods."""

    node_selector: dict[str, str] = spec_field("Labels that a node must have.", default={}, **MAP)
    affinity: dict[str, Any] | None = spec_field("Affinity rules of the pods.", default=None, override=k8s.AFFINITY)
    tolerations: tuple[dict, ...] = spec_field(  # type: ignore[type-arg]
        "Tolerations of the pods. One for the accelerator's taint is always added.",
        default=(),
        maxItems=32,
        items_schema=k8s.TOLERATION,
    )
    topology_spread_constraints: tuple[dict, ...] = spec_field(  # type: ignore[type-arg]
        "Spreading of replicas over nodes or zones. The label selector is filled in.",
        default=(),
        maxItems=8,
        items_schema=k8s.TOPOLOGY_SPREAD,
    )
    priority_class_name: str | None = spec_field("Priority class of the pods.", default=None, maxLength=253)
    runtime_class_name: str | None = spec_field(
        "Runtime class of the pods. Default: the node's.", default=None, maxLength=253
    )
    scheduler_name: str | None = spec_field(
        "Scheduler of the pods. Default: the cluster's.", default=None, maxLength=253
    )
    group_topology_key: str | None = spec_field(
        "Label of nodes, such as a rack's or a network block's, of which all nodes of a group have one value, and no "
        "other group has it. Only with parallelism.nodes above 1.",
        default=None,
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        maxLength=317,
    )
    gang: str = spec_field(
        (
            "Gang scheduling of a group's pods. none: pods are scheduled one by one; a group of which only "
            "some are scheduled after rollout.surgePatienceSeconds is removed and retried later."
        ),
        default="none",
        enum=["none"],
    )
