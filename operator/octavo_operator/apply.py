"""Carries plans out: the only place that writes to the cluster, besides the Lease."""

from __future__ import annotations

import itertools
import logging
import os
import time
from datetime import UTC, datetime
from typing import Any

from octavo_operator.api import API_VERSION, KIND, LLMDeployment
from octavo_operator.cluster import RESOURCES, TRANSPORT_ERRORS, ApiError, Cluster
from octavo_operator.plan import Apply, Delete, Plan, TakeOut, standing
from octavo_operator.render.names import FIELD_MANAGER
from octavo_operator.status import Event
from octavo_operator.store import Observed, Store

logger = logging.getLogger("octavo.operator.apply")

Json = Any


class NameTaken(Exception):
    """An object of one of our names belongs to somebody else."""


class Leaving(Exception):
    """An object of one of our names is on its way out: try again soon."""


class Applier:
    def __init__(self, cluster: Cluster, store: Store) -> None:
        self._cluster, self._store = cluster, store
        self._numbers = itertools.count(time.time_ns())

    async def execute(self, deployment: LLMDeployment, plan: Plan) -> int:
        """Does all of it, in order; returns how many writes that took. Raises ApiError, NameTaken, Leaving."""
        for action in plan.actions:
            match action:
                case TakeOut(target, pointers, manifest):
                    await self._take_out(target, pointers, manifest)
                case Apply(manifest, why, exists):
                    await self._apply(deployment, manifest, why, exists)
                case Delete(target):
                    logger.info("%s/%s: %s %s is deleted", target.namespace, deployment.name, target.kind, target.name)
                    await self._cluster.delete(target.kind, target.namespace, target.name, target.uid)
        return len(plan.actions)

    async def _apply(self, deployment: LLMDeployment, manifest: Json, why: str, exists: bool) -> None:
        kind, meta = manifest["kind"], manifest["metadata"]
        if not exists:
            # Watches see only what carries our label: never take over what somebody else made.
            found = await self._cluster.get(kind, meta["namespace"], meta["name"])
            whose = standing(found, deployment) if found else "ours"
            if whose == "foreign":
                raise NameTaken(f"{kind} {meta['name']}")
            if whose == "leaving":
                raise Leaving(f"{kind} {meta['name']}")
        answer = await self._cluster.apply(manifest, FIELD_MANAGER)
        self._store.put(Observed.of(kind, manifest["apiVersion"], answer))
        logger.info("%s/%s: %s %s: %s", meta["namespace"], deployment.name, kind, meta["name"], why)

    async def _take_out(self, target: Observed, pointers: tuple[str, ...], manifest: Json) -> None:
        removals = [{"op": "remove", "path": pointer} for pointer in pointers]
        logger.info("%s/%s: %s: taken out: %s", target.namespace, target.name, target.kind, ", ".join(pointers))
        try:
            await self._patch(target, removals)
        except ApiError as error:
            if error.status != 422:
                raise
            # The object cannot be without it (a Service's only port): put what it should be in its place at once.
            fields = dict.fromkeys(pointer.split("/")[2] for pointer in pointers)
            spec = manifest["spec"]
            await self._patch(
                target,
                [
                    {"op": "replace", "path": f"/spec/{field}", "value": spec[field]}
                    if field in spec
                    else {"op": "remove", "path": f"/spec/{field}"}
                    for field in fields
                ],
            )

    async def _patch(self, target: Observed, operations: list[Json]) -> None:
        """Of the very version that was looked at; one that has changed since is looked at again when that is heard."""
        test = {"op": "test", "path": "/metadata/resourceVersion", "value": target.resource_version}
        try:
            answer = await self._cluster.json_patch(
                target.kind, target.namespace, target.name, [test, *operations], FIELD_MANAGER
            )
        except ApiError as error:
            if error.status in (404, 409) or "testing path" in error.message or "testing value" in error.message:
                logger.info("%s/%s: %s has changed meanwhile", target.namespace, target.name, target.kind)
                return
            raise
        self._store.put(Observed.of(target.kind, target.api_version, answer))

    async def write_status(self, deployment: LLMDeployment, status: Json) -> None:
        manifest = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": deployment.name, "namespace": deployment.namespace},
            "status": status,
        }
        answer = await self._cluster.apply(manifest, FIELD_MANAGER, "status")
        self._store.put(Observed.of(KIND, API_VERSION, answer))

    async def post(self, deployment: LLMDeployment, event: Event) -> None:
        """Events are for people: one that cannot be written is not worth a failure."""
        now = datetime.now(UTC)
        stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{deployment.name}.{next(self._numbers):x}", "namespace": deployment.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION, "kind": KIND, "name": deployment.name, "namespace": deployment.namespace,
                "uid": deployment.uid,
            },
            "type": event.kind, "reason": event.reason, "message": event.message[:1024], "action": "Reconcile",
            "reportingComponent": FIELD_MANAGER, "reportingInstance": os.environ.get("POD_NAME") or FIELD_MANAGER,
            "source": {"component": FIELD_MANAGER}, "count": 1,
            "firstTimestamp": stamp, "lastTimestamp": stamp, "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }  # fmt: skip
        try:
            await self._cluster.call("POST", RESOURCES["Event"].path(deployment.namespace), body)
        except (*TRANSPORT_ERRORS, ApiError) as error:
            logger.debug("%s/%s: an event was lost: %s", deployment.namespace, deployment.name, error)
