"""The CustomResourceDefinition of LLMGateways."""

from __future__ import annotations

from typing import Any

from octavo_operator.api.gateway import KIND, PLURAL, LLMGatewaySpec
from octavo_operator.api.schema import INT_OR_STRING, object_schema
from octavo_operator.crd import generate

_TYPE = {"type": "string", "description": "Ready, Progressing or Degraded."}
_CONDITION = {**generate.CONDITION, "properties": {**generate.CONDITION["properties"], "type": _TYPE}}
STATUS: dict[str, Any] = {
    "type": "object",
    "description": "Observed state.",
    "properties": {
        "observedGeneration": generate.STATUS["properties"]["observedGeneration"],
        "replicas": {**generate.STATUS["properties"]["replicas"], "description": "Number of routers."},
        "readyReplicas": {**generate.STATUS["properties"]["readyReplicas"], "description": "Number of ready routers."},
        "selector": {"type": "string", "description": "Label selector of the routers, for autoscalers."},
        "url": {"type": "string", "description": "Address of the gateway's API."},
        "models": {
            "type": "array",
            "description": "Model names in requests.",
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
            "items": {
                "type": "object",
                "required": ["name", "llmdeployment", "ready"],
                "properties": {
                    "name": {"type": "string", "description": "Model name in requests."},
                    "llmdeployment": {"type": "string", "description": "LLMDeployment that serves it."},
                    "ready": {"type": "boolean", "description": "Whether a replica of it serves requests."},
                },
            },
        },
        "operator": {"type": "string", "description": "Operator that serves this LLMGateway."},
        "conditions": {**generate.STATUS["properties"]["conditions"], "items": _CONDITION},
    },
}
COLUMNS = [
    generate.column("Ready", f"{generate.READY}.status", description="Whether all routers, of the latest spec, serve."),
    generate.column("Reason", f"{generate.READY}.reason", description="Reason of the condition Ready."),
    generate.column("URL", ".status.url", description="Address of the API."),
    generate.AGE,
    generate.column("Routers", ".status.readyReplicas", "integer", "Number of ready routers.", priority=1),
    generate.column("Desired", ".spec.replicas", "integer", "Desired number of routers.", priority=1),
    generate.column("Models", ".status.models[*].name", description="Model names in requests.", priority=1),
    generate.column("Message", f"{generate.READY}.message", description="Cause and remedy.", priority=1),
]


def manifest() -> dict[str, Any]:
    """The CustomResourceDefinition."""
    names = {
        "kind": KIND,
        "listKind": f"{KIND}List",
        "plural": PLURAL,
        "singular": "llmgateway",
        "shortNames": ["llmg"],
        "categories": ["all"],
    }
    spec = object_schema(LLMGatewaySpec, "Desired state.")
    # Small beats early: the API server judges quantities in the Deployment as well, and Degraded quotes it.
    routing = spec["properties"]["routing"]["properties"]
    for resources in (routing["resources"], routing["pickerResources"]):
        del resources["x-kubernetes-validations"]
        for amounts in resources["properties"].values():
            amounts["additionalProperties"] = {**INT_OR_STRING, "maxLength": 32}
    about = "One address for the models of several LLMDeployments."
    subresources = {"status": {}, "scale": generate.SCALE}
    return generate.definition(names, generate.version(KIND, about, spec, STATUS, COLUMNS, subresources))


def text() -> str:
    """The CRD as YAML."""
    return generate.yaml_text(manifest(), flow=2000, width=400)
