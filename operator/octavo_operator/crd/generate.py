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

ADAPTER_RULE = Rule(
    "!has(self.spec.adapters) || !self.spec.adapters.exists(a, a.name == (has(self.spec.model.name) ? "
    "self.spec.model.name : self.metadata.name))",
    "adapters: a name is the model's own (model.name, or that of the LLMDeployment); choose another",
)

CONDITION: dict[str, Any] = {
    "type": "object",
    "required": ["type", "status", "lastTransitionTime", "reason", "message"],
    "properties": {
        "type": {
            "type": "string",
            "description": "Ready, Available (a replica serves requests), Progressing, ModelCached, RouterReady, "
            "AdaptersReady, KeptFound, ChatFormat, ImageUpToDate, AutoscalerReady or Degraded.",
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


def _seconds(description: str) -> dict[str, Any]:
    return {"type": "number", "description": description}


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
        "start": {
            "type": "object",
            "description": "How many seconds the pod that became ready last took. Absent phases are unknown.",
            "properties": {
                "pod": {"type": "string", "description": "Its name."},
                "readyAt": {"type": "string", "format": "date-time", "description": "When it became ready."},
                "imagePull": _seconds("Pulling its images; 0: the node had them."),
                "fetch": _seconds("Fetching the model into the cache."),
                "load": _seconds("Loading the weights, as the engine reports."),
                "ready": _seconds("From the pod's creation until it was ready."),
                "toolFormat": {
                    "type": "string",
                    "description": "Format of its tool calls; generic: none known.",
                },
            },
        },
        "adapters": {
            "type": "array",
            "description": "LoRA adapters, and how many pods serve each.",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "description": "Its name in requests."},
                    "ready": _count("Number of pods that serve it as it is listed."),
                    "of": _count("Number of pods."),
                    "reason": {"type": "string", "description": "Why one of them does not, in CamelCase."},
                    "message": {"type": "string", "description": "Cause and remedy."},
                },
                "required": ["name"],
            },
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
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


def column(name: str, path: str, kind: str = "string", description: str = "", priority: int = 0) -> dict[str, Any]:
    """A column of `kubectl get`."""
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return {**column, "priority": priority} if priority else column


AGE = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}
READY = ".status.conditions[?(@.type=='Ready')]"
COLUMNS = [
    column("Model", ".spec.model.uri", description="Source of the model."),
    column("Ready", f"{READY}.status", description="Whether all replicas, of the latest spec, serve requests."),
    column("Reason", f"{READY}.reason", description="Reason of the condition Ready."),
    column("Replicas", ".status.readyReplicas", "integer", "Number of ready pods."),
    column("Desired", ".spec.replicas", "integer", "Desired number of pods."),
    column("URL", ".status.url", description="Address of the API in the cluster."),
    AGE,
    column("Updated", ".status.updatedReplicas", "integer", "Number of pods of the latest spec.", priority=1),
    column("Available", ".status.availableReplicas", "integer", "Number of pods that serve requests.", priority=1),
    column("Image", ".status.image", description="Image of the pods.", priority=1),
    column("Operator", ".status.operator", description="Operator that serves it.", priority=1),
    column("Message", f"{READY}.message", description="Cause and remedy.", priority=1),
]
SCALE = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".status.selector",
}


def manifest() -> dict[str, Any]:
    """The CustomResourceDefinition of LLMDeployments."""
    spec = object_schema(api.LLMDeploymentSpec, "Desired state.")
    about = (
        "A large language model, served with an OpenAI-compatible API by pods of the Octavo engine behind one Service."
    )
    names = {
        "kind": api.KIND,
        "listKind": f"{api.KIND}List",
        "plural": api.PLURAL,
        "singular": "llmdeployment",
        "shortNames": ["llmd"],
        "categories": ["all"],
    }
    made = version(api.KIND, about, spec, STATUS, COLUMNS, {"status": {}, "scale": SCALE})
    made["schema"]["openAPIV3Schema"]["x-kubernetes-validations"].append(
        {**ADAPTER_RULE.schema(), "fieldPath": ".spec.adapters"}
    )
    return definition(names, made)


def version(
    kind: str,
    about: str,
    spec: dict[str, Any],
    status: dict[str, Any],
    columns: list[dict[str, Any]],
    subresources: dict[str, Any],
) -> dict[str, Any]:
    """The version of a kind whose objects name a Service."""
    schema = {
        "type": "object",
        "description": about,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"Version of this kind: {api.API_VERSION}."},
            "kind": {"type": "string", "description": f"{kind}."},
            "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
            "spec": spec,
            "status": status,
        },
        "x-kubernetes-validations": [{**rule.schema(), "fieldPath": ".metadata.name"} for rule in NAME_RULES],
    }
    return {
        "name": api.VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": schema},
        "subresources": subresources,
    }


def definition(names: dict[str, Any], version: dict[str, Any]) -> dict[str, Any]:
    """A CustomResourceDefinition of one version."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names['plural']}.{api.GROUP}"},
        "spec": {"group": api.GROUP, "names": names, "scope": "Namespaced", "versions": [version]},
    }


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


class _Flow(dict[str, Any]):
    """A mapping that is written in flow style."""


_Dumper.add_representer(
    _Flow, lambda dumper, data: dumper.represent_mapping("tag:yaml.org,2002:map", data.items(), flow_style=True)
)


def _flowing(value: Any, limit: int) -> Any:
    if isinstance(value, list):
        return [_flowing(one, limit) for one in value]
    if not isinstance(value, dict):
        return value
    if len(yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6)) <= limit:
        return _Flow(value)
    return {key: _flowing(one, limit) for key, one in value.items()}


def text() -> str:
    """The CRD as YAML."""
    return yaml_text(manifest())


def yaml_text(crd: dict[str, Any], flow: int = 0, width: int = 120) -> str:
    """A CRD as YAML. `flow`: mappings of so many characters are written in flow style, whatever they hold."""
    crd = _flowing(crd, flow) if flow else crd
    # Flow style for leaves (None): otherwise over half of the text would be indentation.
    return yaml.dump(crd, Dumper=_Dumper, sort_keys=False, width=width, allow_unicode=True, default_flow_style=None)
