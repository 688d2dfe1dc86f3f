"""LLMDeployments for tests of the operator."""

from __future__ import annotations

import uuid
from typing import Any

from octavo_operator import api
from octavo_operator.kube.store import Observed, Store

Json = dict[str, Any]
# On every LLMDeployment that tests make: the operator under test serves these alone, whatever else the cluster holds.
SESSION = {"octavo.dev/test-session": uuid.uuid4().hex[:6]}
MODEL = {"uri": "smollm2-135m-instruct"}
FULL: dict[str, Any] = {
    "model": {
        "uri": "hf://org/name",
        "name": "main",
        "aliases": ["other"],
        "revision": "abc",
        "chatTemplate": {"configMapRef": {"name": "template"}},
        "credentialsSecretRef": {"name": "hub"},
        "cache": {"mode": "pvc", "pvc": {"size": "40Gi", "storageClassName": "fast", "accessModes": ["ReadWriteMany"]}},
    },
    "engine": {
        "dtype": "bfloat16",
        "maxModelLen": 8192,
        "gpuMemoryUtilization": 85,
        "prefixCaching": False,
        "args": ["--seed", "3"],
    },
    "accelerator": {"count": 1},
    "resources": {"requests": {"cpu": 4, "memory": "32Gi"}, "limits": {"memory": "48Gi"}},
    "replicas": 3,
    "routing": {"strategy": "clientIP"},
    "auth": {"apiKeySecretRef": {"name": "keys"}},
    "monitoring": {"labels": {"release": "prometheus"}},
}  # a spec with most groups of fields


def manifest(name: str = "toy", namespace: str = "default", **spec: Any) -> Json:
    """As a user writes it."""
    return {
        "apiVersion": api.API_VERSION,
        "kind": api.KIND,
        "metadata": {"name": name, "namespace": namespace, "labels": dict(SESSION)},
        "spec": {"model": MODEL, **spec},
    }


def parsed(name: str = "toy", namespace: str = "default", **spec: Any) -> api.LLMDeployment:
    """As the operator sees it."""
    out = manifest(name, namespace, **spec)
    out["metadata"] |= {"uid": "11111111-2222-3333-4444-555555555555", "generation": 1}
    return api.LLMDeployment.from_json(out)


def store_of(*pods: Json, status: Json | None = None, **spec: Any) -> Store:
    """What the operator knows of one autoscaled LLMDeployment and its pods."""
    store = Store()
    body = manifest("toy", **{"autoscaling": {"maxReplicas": 8}, **spec})
    body["metadata"] |= {"uid": "u", "generation": 1, "resourceVersion": "1"}
    store.put(Observed.of(api.KIND, api.API_VERSION, {**body, **({"status": status} if status else {})}))
    for one in pods:
        store.put(Observed.of("Pod", "v1", one))
    return store


def toy(image: str, *arguments: str, name: str = "toy", patches: tuple[Json, ...] = (), **spec: Any) -> Json:
    """Pods of a tiny program that answers probes: what is judged is the operator, not the engine."""
    args = list(arguments) or ["serve", ":8001"]
    spec = {
        "model": {"uri": "file:///model"},
        "lifecycle": {"preStopSeconds": 0, "drainSeconds": 1},
        "podPatches": [
            {"op": "replace", "path": "/spec/containers/0/command", "value": ["/toolbox"]},
            {"op": "replace", "path": "/spec/containers/0/args", "value": args},
            *patches,
        ],
        **spec,
    }
    spec["engine"] = {"image": image, "imagePullPolicy": "Never", **spec.get("engine", {})}
    out = manifest(name, **spec)
    del out["metadata"]["namespace"]
    return out
