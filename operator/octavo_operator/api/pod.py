# ruff: noqa: RUF009  (spec_field makes a dataclass field)
"""podPatches, volumes, foreignFields and other fields in the format of Kubernetes' own API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from octavo_operator.api.schema import Rule, spec_field

_ANYTHING = {"x-kubernetes-preserve-unknown-fields": True}
# Validated by the API server as part of the Deployment: a copy of its schemas would be ten times the size of this CRD.
VOLUME: dict[str, Any] = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string", "description": "Name of the volume.", "minLength": 1, "maxLength": 63}},
    **_ANYTHING,
}
VOLUME_MOUNT: dict[str, Any] = {
    "type": "object",
    "required": ["name", "mountPath"],
    "properties": {
        "name": {"type": "string", "description": "Name of the volume.", "minLength": 1, "maxLength": 63},
        "mountPath": {"type": "string", "description": "Path in the container.", "minLength": 1, "maxLength": 1024},
    },
    **_ANYTHING,
}
ENV_FROM: dict[str, Any] = {"type": "object", "minProperties": 1, **_ANYTHING}

POD_LABELS = Rule(
    "self.all(key, !key.startsWith('octavo.dev/') && !(key in ['app.kubernetes.io/name', 'app.kubernetes.io/instance', "
    "'app.kubernetes.io/component', 'app.kubernetes.io/part-of', 'app.kubernetes.io/managed-by', "
    "'pod-template-hash']))",
    "podLabels: octavo.dev/..., app.kubernetes.io/{name,instance,component,part-of,managed-by} and pod-template-hash "
    "are set by the operator and by Kubernetes; choose other keys",
)
VOLUME_NAMES = Rule(
    "!self.exists(v, v.name in ['cache', 'tmp', 'shm', 'model'])",
    "volumes: the names cache, tmp, shm and model are the operator's; choose another name",
)
MOUNT_PATHS = Rule(
    "!self.exists(m, m.mountPath in ['/cache', '/tmp', '/dev/shm', '/models'])",
    "volumeMounts: /cache, /tmp, /dev/shm and /models are mounted by the operator; choose another mountPath, or use "
    "model.cache",
)


@dataclass(frozen=True, kw_only=True)
class PodPatch:
    """One operation of spec.podPatches (RFC 6902)."""

    # Rules cannot see a value of any type, so this one is plain OpenAPI.
    EXTRA_SCHEMA: ClassVar = {
        "anyOf": [{"properties": {"op": {"enum": ["remove", "move", "copy"]}}}, {"required": ["value"]}]
    }
    RULES: ClassVar = (Rule("!(self.op in ['move', 'copy']) || has(self.from)", "podPatches: move and copy need from"),)
    op: str = spec_field("Operation.", enum=["add", "remove", "replace", "move", "copy", "test"])
    path: str = spec_field(
        "JSON pointer into the pod template, such as /spec/containers/0/env/-.",
        maxLength=512,
        pattern="^/(spec|metadata)/.+",
    )
    from_: str | None = spec_field(
        "JSON pointer to the source of move and copy.", default=None, maxLength=512, pattern="^/(spec|metadata)/.+"
    )
    value: Any = spec_field("Value of add, replace and test.", default=None, override=dict(_ANYTHING))


@dataclass(frozen=True, kw_only=True)
class ForeignField:
    """One of spec.foreignFields: fields of other controllers that stay."""

    kind: str = spec_field(
        "Kind of the object.",
        enum=[
            "Service",
            "Deployment",
            "LeaderWorkerSet",
            "ServiceAccount",
            "NetworkPolicy",
            "PodDisruptionBudget",
            "HorizontalPodAutoscaler",
            "PodMonitor",
            "ServiceMonitor",
            "ScaledObject",
            "InferencePool",
        ],
    )
    path: str = spec_field(
        "Path of the field, such as /spec/loadBalancerIP or /spec/template/spec/containers/engine/env/STAKATER_*: "
        "list items by name, or by index; * matches any text within a segment. Fields below the path are included.",
        maxLength=512,
        pattern="^/spec/[^/]",
    )
