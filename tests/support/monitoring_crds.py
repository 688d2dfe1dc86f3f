"""The Prometheus operator's kinds, as far as we use them: strict, so that a misspelt field is refused."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
GROUP = "monitoring.coreos.com"


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties}


_TEXT = {"type": "string"}
_LABELS = {"type": "object", "additionalProperties": _TEXT}
_RELABELING = _object(
    sourceLabels={"type": "array", "items": _TEXT}, targetLabel=_TEXT, regex=_TEXT, action=_TEXT, replacement=_TEXT
)
_ENDPOINTS = {
    "type": "array",
    "items": _object(
        port=_TEXT, path=_TEXT, interval=_TEXT, honorLabels={"type": "boolean"},
        relabelings={"type": "array", "items": _RELABELING},
    ),
}  # fmt: skip


def manifests() -> list[Json]:
    """CustomResourceDefinitions of PodMonitor and ServiceMonitor."""
    return [_crd("PodMonitor", "podMetricsEndpoints"), _crd("ServiceMonitor", "endpoints")]


def _crd(kind: str, endpoints: str) -> Json:
    spec = _object(selector=_object(matchLabels=_LABELS), **{endpoints: _ENDPOINTS})
    spec["required"] = ["selector", endpoints]
    schema = {"type": "object", "required": ["spec"], "properties": {"spec": spec}}
    plural = f"{kind.lower()}s"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
        },
    }
