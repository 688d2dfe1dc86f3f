"""Carries plans out: the only place that writes to the cluster, besides the Lease."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from octavo_operator.api import API_VERSION, KIND, LLMDeployment, Unreadable
from octavo_operator.cluster import RESOURCES, TRANSPORT_ERRORS, ApiError, Cluster
from octavo_operator.plan import APPLIED, Apply, Delete, Plan, TakeOut, standing
from octavo_operator.refusals import Place, Refusals
from octavo_operator.render.names import FIELD_MANAGER
from octavo_operator.status import Event
from octavo_operator.store import Observed, Store

logger = logging.getLogger("octavo.operator.apply")

Json = Any


class NameTaken(Exception):
    """An object of one of our names belongs to somebody else."""


class Leaving(Exception):
    """An object of one of our names, or its kind, is on its way out: look again soon."""


class NotLeading(Exception):
    """Another operator may be at work: nothing is written."""


Refusal = ApiError | NameTaken | Leaving


class Applier:
    """`may_write` is asked before each write."""

    def __init__(self, cluster: Cluster, store: Store, may_write: Callable[[], bool]) -> None:
        self._cluster, self._store, self._may_write = cluster, store, may_write
        self._numbers = itertools.count(time.time_ns())
        self.refusals = Refusals(time.monotonic)

    async def execute(self, deployment: LLMDeployment, plan: Plan) -> list[Refusal]:
        """Does all of it, in order; what is refused does not keep the rest from being done. Returns the refusals.

        Raises TRANSPORT_ERRORS and NotLeading, and ApiError for what may go away by itself: trying the rest then would
        only add to the API server's burden.
        """
        refused: list[Refusal] = []
        unguarded = False
        for action in plan.actions:
            kind = action.manifest["kind"] if isinstance(action, Apply) else None
            if unguarded and kind == "Deployment" and isinstance(action, Apply) and not action.exists:
                continue  # no pods before the policy that guards them
            try:
                await self._unless_refused(deployment, action)
            except ApiError as error:
                if error.is_transient or error.is_namespace_leaving:
                    raise
                refused.append(error)
            except (NameTaken, Leaving) as error:
                refused.append(error)
            else:
                continue
            unguarded |= kind == "NetworkPolicy"
        return refused

    async def _unless_refused(self, deployment: LLMDeployment, action: Apply | TakeOut | Delete) -> None:
        """What was refused a moment ago is refused again without asking, as long as it is the very same."""
        key, (place, what) = (deployment.namespace, deployment.name), _identity(action)
        self.refusals.check(key, place, what)
        try:
            await self._carry_out(deployment, action)
        except (ApiError, NameTaken) as error:
            if isinstance(error, NameTaken) or not (error.is_transient or error.is_namespace_leaving):
                logger.warning("%s/%s: %s %s: refused: %s", *key, *place, error)
                self.refusals.note(key, place, what, error)
            raise
        self.refusals.forget(key, place)

    async def _carry_out(self, deployment: LLMDeployment, action: Apply | TakeOut | Delete) -> None:
        self._check_lead()
        match action:
            case TakeOut(target, pointers, manifest):
                await self._take_out(target, pointers, manifest)
            case Apply(manifest, why, exists):
                await self._apply(deployment, manifest, why, exists)
            case Delete(target):
                logger.info("%s/%s: %s %s is deleted", target.namespace, deployment.name, target.kind, target.name)
                await self._cluster.delete(target.kind, target.namespace, target.name, target.uid)

    def _check_lead(self) -> None:
        if not self._may_write():
            raise NotLeading

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
        try:
            answer = await self._cluster.apply(manifest, FIELD_MANAGER)
        except ApiError as error:
            if error.is_kind_leaving:
                raise Leaving(f"{kind}: {error.message}") from error
            raise
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

    async def write_status(self, deployment: LLMDeployment | Unreadable, status: Json) -> None:
        self._check_lead()
        manifest = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": deployment.name, "namespace": deployment.namespace},
            "status": status,
        }
        answer = await self._cluster.apply(manifest, FIELD_MANAGER, "status")
        self._store.put(Observed.of(KIND, API_VERSION, answer))

    async def post(self, deployment: LLMDeployment | Unreadable, event: Event) -> None:
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


def _identity(action: Apply | TakeOut | Delete) -> tuple[Place, str]:
    """The object that it is about, and what tells it from another action on the same."""
    match action:
        case Apply(manifest, _, exists):
            meta = manifest["metadata"]
            return (manifest["kind"], meta["name"]), f"apply {meta['annotations'][APPLIED]} {exists}"
        case TakeOut(target, pointers, _):
            return (target.kind, target.name), f"take out {pointers}"
        case Delete(target):
            return (target.kind, target.name), f"delete {target.uid}"
