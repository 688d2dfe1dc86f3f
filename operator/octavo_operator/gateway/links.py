"""Links between LLMGateways and the LLMDeployments they select: a change of one enqueues the others.

A gateway is reconciled when an LLMDeployment of its namespace comes, goes, or changes its names, labels or readiness,
and not at each change of its status. An LLMDeployment is reconciled when a gateway comes, goes or selects others: its
pods then need a headless Service, and a way through their NetworkPolicy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo_operator.api import KIND, Key, LLMDeployment, SpecError
from octavo_operator.api import gateway as api
from octavo_operator.api.common import gateway_key, gateway_name
from octavo_operator.api.gateway import LLMGateway
from octavo_operator.diff import digest
from octavo_operator.kube.store import Observed, Store
from octavo_operator.render.router.served import Candidate
from octavo_operator.times import parse_time

Json = dict[str, Any]


class GatewayLinks:
    """`enqueue` is called with the keys to reconcile."""

    def __init__(self, store: Store, enqueue: Callable[[Key], None]) -> None:
        self._store, self._enqueue = store, enqueue
        self._faces: dict[Key, str] = {}  # what others see of each
        self._known: dict[Key, tuple[list[str], tuple[str, ...]]] = {}  # gateways of each, and as of which versions

    def update(self, key: Key) -> None:
        """An LLMDeployment or an LLMGateway may have changed, come or gone."""
        name, namespace = gateway_name(key), key[0]
        seen = self._store.get(api.KIND if name else KIND, namespace, name or key[1])
        face = None if seen is None else digest(_gateway_face(seen.body) if name else _deployment_face(seen.body))
        if face == self._faces.get(key):
            return
        if face is None:
            del self._faces[key]
            self._known.pop(key, None)
        else:
            self._faces[key] = face
        for one in self._store.owners(KIND if name else api.KIND, namespace):
            self._enqueue((namespace, one.name) if name else gateway_key(namespace, one.name))

    def candidates(self, gateway: LLMGateway) -> list[Candidate]:
        """The LLMDeployments that a gateway selects."""
        found = []
        for one in self._store.owners(KIND, gateway.namespace):
            body = one.body
            if _is_deleted(body) or not gateway.selects(body["metadata"].get("labels") or {}):
                continue
            if deployment := _named(body):
                found.append(Candidate(deployment, int(parse_time(body["metadata"]["creationTimestamp"]))))
        return found

    def has_namesake(self, gateway: LLMGateway) -> bool:
        """True if an LLMDeployment of the namespace has the gateway's name, and so its Service's."""
        return self._store.get(KIND, gateway.namespace, gateway.name) is not None

    def gateways_of(self, deployment: LLMDeployment) -> tuple[str, ...]:
        """Names of the gateways that select an LLMDeployment."""
        key = deployment.namespace, deployment.name
        seen, found = self._store.get(KIND, *key), self._store.owners(api.KIND, deployment.namespace)
        if seen is None or not found:
            return ()
        versions = [one.resource_version for one in (seen, *found)]
        known = self._known.get(key)
        if known is None or known[0] != versions:
            labels = seen.body["metadata"].get("labels") or {}
            known = self._known[key] = (versions, tuple(one.name for one in found if _selects(one, labels)))
        return known[1]


def _deployment_face(body: Json) -> Json:
    meta, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    model, adapters = spec.get("model") or {}, [one.get("name") for one in spec.get("adapters") or []]
    return {
        "uid": meta["uid"],
        "labels": meta.get("labels") or {},
        "deleted": _is_deleted(body),
        "names": [model.get("name"), model.get("aliases") or [], adapters],
        "ready": [is_available(status), *sorted(ready_adapters(status))],
    }


def _gateway_face(body: Json) -> Json:
    selector = (body.get("spec") or {}).get("selector")
    return {"uid": body["metadata"]["uid"], "deleted": _is_deleted(body), "selector": selector}


def _is_deleted(body: Json) -> bool:
    return "deletionTimestamp" in body["metadata"]


def is_available(status: Json) -> bool:
    """True if a replica of an LLMDeployment with this status serves requests."""
    conditions = status.get("conditions") or []
    return any((one["type"], one["status"]) == ("Available", "True") for one in conditions)


def ready_adapters(status: Json) -> set[str]:
    """Adapters that a pod of an LLMDeployment with this status serves."""
    return {one["name"] for one in status.get("adapters") or [] if one.get("ready")}


def _selects(one: Observed, labels: dict[str, str]) -> bool:
    """A gateway whose spec no longer parses goes on with what it has selected."""
    body = one.body
    if _is_deleted(body):
        return False
    selector = (body.get("spec") or {}).get("selector")
    return LLMGateway.from_json({**body, "spec": {"selector": selector} if selector else {}}).selects(labels)


def _named(body: Json) -> LLMDeployment | None:
    """The LLMDeployment; of one whose spec no longer parses, its names, under which its running pods serve."""
    model = (body.get("spec") or {}).get("model") or {}
    for spec in (body.get("spec") or {}, {"model": {name: model[name] for name in model.keys() & _NAMES}}):
        try:
            return LLMDeployment.from_json({**body, "spec": spec})
        except SpecError:
            continue
    return None


_NAMES = {"uri", "name", "aliases"}
