"""The CustomResourceDefinition: schema of the spec from the dataclasses of api/, and of the status as written here."""

from __future__ import annotations

from typing import Any

import yaml

from octavo_operator import api
from octavo_operator.api.schema import Rule, object_schema

NAME_RULES = (
    Rule(
        "size(self.metadata.name) <= 40 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name: at most 40 lower-case letters, digits and '-', beginning with a letter: it names the Service "
        "as well",
    ),
)

CONDITION: dict[str, Any] = {
    "type": "object",
    "required": ["type", "status", "lastTransitionTime", "reason", "message"],
    "properties": {
        "type": {
            "type": "string",
            "description": "Ready, Available (a replica serves requests), Progressing, ModelCached, ImageUpToDate, "
            "AutoscalerReady or Degraded.",
        },
        "status": {
            "type": "string",
            "enum": ["True", "False", "Unknown"],
            "description": "Whether the condition holds.",
        },
        "observedGeneration": {
            "type": "integer",
            "format": "int64",
            "description": "Generation of the spec that the condition was set for.",
        },
        "lastTransitionTime": {
            "type": "string",
            "format": "date-time",
            "description": "Time of the last change of status.",
        },
        "reason": {"type": "string", "description": "Machine-readable cause, in CamelCase."},
        "message": {"type": "string", "description": "Cause and remedy."},
    },
}


def _count(description: str) -> dict[str, Any]:
    return {"type": "integer", "format": "int32", "description": description}


STATUS: dict[str, Any] = {
    "type": "object",
    "description": "Observed state.",
    "properties": {
        "observedGeneration": {
            "type": "integer",
            "format": "int64",
            "description": "Generation of the spec that the operator has processed.",
        },
        "replicas": _count("Number of pods."),
        "readyReplicas": _count("Number of ready pods."),
        "availableReplicas": _count("Number of pods ready for at least rollout.minReadySeconds."),
        "updatedReplicas": _count("Number of pods of the latest spec."),
        "selector": {"type": "string", "description": "Label selector of the pods, for autoscalers."},
        "url": {"type": "string", "description": "Address of the OpenAI-compatible API in the cluster."},
        "image": {"type": "string", "description": "Image of the pods."},
        "operator": {
            "type": "string",
            "description": "Operator that serves this LLMDeployment: namespace/name of its Lease. Others ignore it.",
        },
        "replicaCapacity": _count("Observed number of requests that one pod handles at once; used by autoscaling."),
        "conditions": {
            "type": "array",
            "description": "Current conditions.",
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
            "items": CONDITION,
        },
    },
}


def _column(name: str, path: str, kind: str = "string", description: str = "", priority: int = 0) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return {**column, "priority": priority} if priority else column


_READY = ".status.conditions[?(@.type=='Ready')]"
COLUMNS = [
    _column("Model", ".spec.model.uri", description="Source of the model."),
    _column("Ready", f"{_READY}.status", description="Whether all replicas, of the latest spec, serve requests."),
    _column("Reason", f"{_READY}.reason", description="Reason of the condition Ready."),
    _column("Replicas", ".status.readyReplicas", "integer", "Number of ready pods."),
    _column("Desired", ".spec.replicas", "integer", "Desired number of pods."),
    _column("URL", ".status.url", description="Address of the API in the cluster."),
    _column("Age", ".metadata.creationTimestamp", "date"),
]
del COLUMNS[-1]["description"]


def manifest() -> dict[str, Any]:
    """The CustomResourceDefinition."""
    spec = object_schema(api.LLMDeploymentSpec, "Desired state.")
    schema = {
        "type": "object",
        "description": "A large language model, served with an OpenAI-compatible API by pods of the Octavo engine "
        "behind one Service.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of this kind: octavo.dev/v1alpha1."},
            "kind": {"type": "string", "description": "LLMDeployment."},
            "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
            "spec": spec,
            "status": STATUS,
        },
        "x-kubernetes-validations": [{**rule.schema(), "fieldPath": ".metadata.name"} for rule in NAME_RULES],
    }
    version = {
        "name": api.VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": COLUMNS,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
    }
    names = {
        "kind": api.KIND, "listKind": f"{api.KIND}List", "plural": api.PLURAL, "singular": "llmdeployment",
        "shortNames": ["llmd"], "categories": ["all"],
    }  # fmt: skip
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{api.PLURAL}.{api.GROUP}"},
        "spec": {"group": api.GROUP, "names": names, "scope": "Namespaced", "versions": [version]},
    }


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def text() -> str:
    """The CRD as YAML."""
    # Flow style for leaves (None): otherwise over half of the text would be indentation.
    return yaml.dump(
        manifest(), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True, default_flow_style=None
    )
