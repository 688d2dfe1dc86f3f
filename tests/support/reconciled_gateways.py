"""LLMGateways, and the objects that a first reconciliation of them leaves."""

from __future__ import annotations

from typing import Any

from support.llmd import parsed

from octavo_operator.api import API_VERSION
from octavo_operator.api import gateway as api
from octavo_operator.api.gateway import LLMGateway
from octavo_operator.kube.store import Observed
from octavo_operator.render.router.objects import FILES
from octavo_operator.render.router.served import Candidate
from octavo_operator.writes.plan import Apply, Plan

Json = dict[str, Any]
AVAILABLE = {"type": "Available", "status": "True", "reason": "Serving", "message": ""}


def body(name: str = "all", **spec: Any) -> Json:
    metadata = {"name": name, "namespace": "default", "uid": f"uid-of-{name}", "generation": 1}
    return {"apiVersion": API_VERSION, "kind": api.KIND, "metadata": metadata, "spec": spec}


def gateway(**spec: Any) -> LLMGateway:
    return LLMGateway.from_json(body(**spec))


def model(name: str, created: int = 1, ready: bool = True, **fields: Any) -> Candidate:
    one = parsed(name, model={"uri": "hf://org/name", **fields})
    one.status.update(conditions=[AVAILABLE] if ready else [])
    return Candidate(one, created)


def live(manifest: Json, version: int = 1, **status: Any) -> Observed:
    kind, metadata = manifest["kind"], manifest["metadata"]
    found = {**metadata, "uid": metadata.get("uid", kind), "resourceVersion": str(version), "generation": 1}
    return Observed.of(kind, manifest["apiVersion"], {**manifest, "metadata": found, "status": status})


def carried_out(plan: Plan, available: int = 2) -> list[Observed]:
    """The objects once a plan of a first reconciliation is done."""
    made = [one.manifest for one in plan.actions if isinstance(one, Apply)]
    counts = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), available)
    return [live(one, observedGeneration=1, **counts) if one["kind"] == "Deployment" else live(one) for one in made]


def pod(stamp: str | None = None) -> Observed:
    metadata: Json = {
        "name": "all-router-x",
        "namespace": "default",
        "uid": "pod",
        "resourceVersion": "1",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "annotations": {"other": "x", **({FILES: stamp} if stamp else {})},
        "labels": {"octavo.dev/llmgateway": "all", "app.kubernetes.io/component": "router"},
    }
    return Observed.of("Pod", "v1", {"metadata": metadata, "spec": {}, "status": {"phase": "Running"}})
