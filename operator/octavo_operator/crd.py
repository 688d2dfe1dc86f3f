"""The CustomResourceDefinition, made from api/.

`python -m octavo_operator.crd > crds/octavo.dev_llmdeployments.yaml`
"""

from __future__ import annotations

import sys
from typing import Any

import yaml

from octavo_operator import api
from octavo_operator.schema import Rule, object_schema

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
            "description": "Ready, Available (requests are answered now), Progressing, ModelCached, AutoscalerReady or "
            "Degraded.",
        },
        "status": {"type": "string", "enum": ["True", "False", "Unknown"], "description": "Whether it holds."},
        "observedGeneration": {"type": "integer", "format": "int64", "description": "Of the spec that was looked at."},
        "lastTransitionTime": {"type": "string", "format": "date-time", "description": "When status changed last."},
        "reason": {"type": "string", "description": "Cause in one word."},
        "message": {"type": "string", "description": "Cause and way out in a sentence."},
    },
}


def _count(description: str) -> dict[str, Any]:
    return {"type": "integer", "format": "int32", "description": description}


STATUS: dict[str, Any] = {
    "type": "object",
    "description": "What is.",
    "properties": {
        "observedGeneration": {
            "type": "integer",
            "format": "int64",
            "description": "Of the spec that this status tells of.",
        },
        "replicas": _count("Pods that there are."),
        "readyReplicas": _count("Pods that take requests."),
        "availableReplicas": _count("Pods that have been ready for rollout.minReadySeconds."),
        "updatedReplicas": _count("Pods of the latest spec."),
        "selector": {"type": "string", "description": "Labels of the pods, for autoscalers."},
        "url": {"type": "string", "description": "Address of the OpenAI API in the cluster."},
        "image": {"type": "string", "description": "Image that the pods run."},
        "replicaCapacity": _count("Requests that one pod was seen to hold at once; autoscaling counts with it."),
        "conditions": {
            "type": "array",
            "description": "What can be said about it.",
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
    _column("Model", ".spec.model.uri", description="Where the model comes from."),
    _column("Ready", f"{_READY}.status", description="All replicas of the latest spec answer."),
    _column("Reason", f"{_READY}.reason", description="Why, or why not."),
    _column("Replicas", ".status.readyReplicas", "integer", "Pods that take requests."),
    _column("Desired", ".spec.replicas", "integer", "Pods that are wanted."),
    _column("URL", ".status.url", description="Address in the cluster."),
    _column("Age", ".metadata.creationTimestamp", "date"),
]
del COLUMNS[-1]["description"]


def manifest() -> dict[str, Any]:
    """The CRD as an object of the API."""
    spec = object_schema(api.LLMDeploymentSpec, "What is wanted.")
    schema = {
        "type": "object",
        "description": "A large language model, served by pods of the Octavo engine behind one Service with OpenAI's "
        "API.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of this kind: octavo.dev/v1alpha1."},
            "kind": {"type": "string", "description": "LLMDeployment."},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": STATUS,
        },
        "x-kubernetes-validations": [rule.schema() for rule in NAME_RULES],
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
        "kind": api.KIND,
        "listKind": f"{api.KIND}List",
        "plural": api.PLURAL,
        "singular": "llmdeployment",
        "shortNames": ["llmd"],
        "categories": ["all"],
    }
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
    # What holds nothing else stands on one line (flow style None): over half of the text would be indentation.
    return yaml.dump(
        manifest(), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True, default_flow_style=None
    )


if __name__ == "__main__":
    sys.stdout.write(text())
