"""Kinds of others, as far as we use them: strict, so that a misspelt field is refused."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def _object(*required: str, **properties: Json) -> Json:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def _list(items: Json, most: int = 16) -> Json:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


_TEXT = {"type": "string"}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_LABELS = {"type": "object", "additionalProperties": _TEXT}
_RELABELING = _object(
    sourceLabels={"type": "array", "items": _TEXT}, targetLabel=_TEXT, regex=_TEXT, action=_TEXT, replacement=_TEXT
)
_ENDPOINTS = {
    "type": "array",
    "items": _object(
        port=_TEXT,
        path=_TEXT,
        interval=_TEXT,
        honorLabels={"type": "boolean"},
        relabelings={"type": "array", "items": _RELABELING},
    ),
}
_PICKER = {
    **_object(
        "name",
        group={**_TEXT, "default": ""},
        kind={**_TEXT, "default": "Service"},
        name=_TEXT,
        port=_object("number", number=_PORT),
        failureMode={**_TEXT, "enum": ["FailOpen", "FailClose"], "default": "FailClose"},
    ),
    "x-kubernetes-validations": [
        {"rule": "self.kind != 'Service' || has(self.port)", "message": "a Service needs a port"}
    ],
}
_POOL = _object(
    "selector",
    "targetPorts",
    "endpointPickerRef",
    selector=_object("matchLabels", matchLabels=_LABELS),
    targetPorts={
        **_list(_object("number", number=_PORT), 8),
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["number"],
    },
    appProtocol={**_TEXT, "enum": ["http", "kubernetes.io/h2c"]},
    endpointPickerRef=_PICKER,
)


_LONG, _DURATION = {**_TEXT, "maxLength": 253}, {**_TEXT, "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
_ROUTE = _object(
    parentRefs=_list(
        _object(
            "name",
            group={**_LONG, "default": "gateway.networking.k8s.io"},
            kind={**_TEXT, "default": "Gateway"},
            name=_LONG,
            namespace=_LONG,
            sectionName=_LONG,
        ),
        32,
    ),
    hostnames=_list(
        {
            **_LONG,
            "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
        }
    ),
    rules=_list(
        _object(
            matches=_list(
                _object(
                    path=_object(
                        type={**_TEXT, "enum": ["Exact", "PathPrefix", "RegularExpression"]},
                        value=_TEXT,
                    )
                )
            ),
            backendRefs=_list(
                _object(
                    "name",
                    group={**_TEXT, "default": ""},
                    kind={**_TEXT, "default": "Service"},
                    name=_LONG,
                    port=_PORT,
                    weight={"type": "integer", "minimum": 0, "maximum": 1000000, "default": 1},
                )
            ),
            timeouts=_object(request=_DURATION, backendRequest=_DURATION),
        )
    ),
)
_ROUTE_STATUS = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_WHOLE = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}  # a pod template: Kubernetes' own
_COUNT = {"x-kubernetes-int-or-string": True}
_GROUPS = _object(
    "leaderWorkerTemplate",
    replicas={"type": "integer", "default": 1},
    startupPolicy={**_TEXT, "enum": ["LeaderCreated", "LeaderReady"], "default": "LeaderCreated"},
    networkConfig=_object("subdomainPolicy", subdomainPolicy={**_TEXT, "enum": ["Shared", "UniquePerReplica"]}),
    rolloutStrategy=_object(
        "type",
        type={**_TEXT, "enum": ["RollingUpdate"]},
        rollingUpdateConfiguration=_object(partition={"type": "integer"}, maxSurge=_COUNT, maxUnavailable=_COUNT),
    ),
    leaderWorkerTemplate=_object(
        "workerTemplate",
        size={"type": "integer", "minimum": 1},
        leaderTemplate=_WHOLE,
        workerTemplate=_WHOLE,
        restartPolicy={**_TEXT, "enum": ["Default", "RecreateGroupOnPodRestart", "None"]},
    ),
)


def monitoring() -> list[Json]:
    """CustomResourceDefinitions of PodMonitor and ServiceMonitor."""
    return [
        _crd(
            "monitoring.coreos.com",
            kind,
            _object(
                "selector",
                field,
                **{
                    "selector": _object(matchLabels=_LABELS),
                    field: _ENDPOINTS,
                },
            ),
        )
        for kind, field in (("PodMonitor", "podMetricsEndpoints"), ("ServiceMonitor", "endpoints"))
    ]


def inference_pool() -> Json:
    """The CustomResourceDefinition of InferencePool, of the Gateway API Inference Extension."""
    return _crd("inference.networking.k8s.io", "InferencePool", _POOL)


def http_route() -> Json:
    """The CustomResourceDefinition of HTTPRoute, of the Gateway API."""
    return _crd("gateway.networking.k8s.io", "HTTPRoute", _ROUTE, _ROUTE_STATUS)


def leader_worker_set() -> Json:
    """The CustomResourceDefinition of LeaderWorkerSet. Nobody makes its pods."""
    return _crd("leaderworkerset.x-k8s.io", "LeaderWorkerSet", _GROUPS)


def manifests() -> list[Json]:
    """All of them but LeaderWorkerSet, which takes the place of a Deployment."""
    return [*monitoring(), inference_pool(), http_route()]


def _crd(group: str, kind: str, spec: Json, status: Json | None = None) -> Json:
    schema = _object("spec", spec=spec, **({"status": status} if status else {}))
    plural = f"{kind.lower()}s"
    annotations = {"api-approved.kubernetes.io": "https://example.com/tests"} if group.endswith(".k8s.io") else {}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}", "annotations": annotations},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
            "versions": [
                {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
                | ({"subresources": {"status": {}}} if status else {})
            ],
        },
    }
