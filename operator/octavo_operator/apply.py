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
from octavo_operator.contests import Contests
from octavo_operator.diff import digest
from octavo_operator.kube.client import RESOURCES, TRANSPORT_ERRORS, ApiError, Cluster
from octavo_operator.kube.rejected_writes import Place, Refusals
from octavo_operator.kube.store import Key, Observed, Store
from octavo_operator.plan import APPLIED, Apply, Delete, Plan, Repair, standing
from octavo_operator.rejections import NameTaken, is_passing
from octavo_operator.render.names import FIELD_MANAGER
from octavo_operator.status import Event

logger = logging.getLogger("octavo.operator.apply")

Json = Any


# No pods without the policy that guards them, nor with an account of this name that is somebody else's.
_BEFORE_PODS = ("NetworkPolicy", "ServiceAccount")


class Leaving(Exception):
    """An object of one of our names, or its kind, is on its way out: look again soon."""


class ChangedMeanwhile(Exception):
    """An object is not the one that was looked at any more: look again."""


class NotLeading(Exception):
    """Another operator may be at work: nothing is written."""


Refusal = ApiError | NameTaken | Leaving | ChangedMeanwhile


class Applier:
    """`may_write` is asked before each write."""

    def __init__(self, cluster: Cluster, store: Store, may_write: Callable[[], bool]) -> None:
        self._cluster, self._store, self._may_write = cluster, store, may_write
        self._numbers = itertools.count(time.time_ns())
        self.refusals = Refusals(time.monotonic)
        self.contests = Contests(time.monotonic)

    async def execute(self, deployment: LLMDeployment, plan: Plan) -> list[Refusal]:
        """Does all of it, in order; what is refused does not keep the rest from being done. Returns the refusals.

        Raises TRANSPORT_ERRORS and NotLeading, and ApiError where trying the rest would only add to the API server's
        burden.
        """
        refused: list[Refusal] = []
        unguarded = False
        key = (deployment.namespace, deployment.name)
        self.refusals.keep(key, {_identity(action)[0] for action in plan.actions})
        contested, written = self._contested(key, plan), set[Place]()
        for action in plan.actions:
            place = _identity(action)[0]
            kind = action.manifest["kind"] if isinstance(action, Apply) else None
            if place in contested:
                unguarded |= isinstance(action, Apply) and kind in _BEFORE_PODS and not action.exists
                continue
            if unguarded and kind == "Deployment" and isinstance(action, Apply) and not action.exists:
                continue
            try:
                await self._unless_refused(deployment, action)
            except ApiError as error:
                if error.status == 429 or error.is_namespace_leaving:
                    raise
                refused.append(error)
            except (NameTaken, Leaving) as error:
                refused.append(error)
            except ChangedMeanwhile as error:
                refused.append(error)
                contested.add(place)  # what else was to be done with it is out of date, too
            else:
                if place not in written:
                    written.add(place)
                    self.contests.written(key, place)
                continue
            unguarded |= kind in _BEFORE_PODS
        return refused

    def _contested(self, key: Key, plan: Plan) -> set[Place]:
        """What somebody else alters or deletes again and again, and is let be for a while."""
        wanted: dict[Place, tuple[str, str, tuple[str, ...]]] = {}
        for action in plan.actions:
            place = _identity(action)[0]
            target = self._store.get(place[0], key[0], place[1])
            managers = target.managers if target else ()
            if isinstance(action, Repair):
                wanted.setdefault(place, (action.applied, action.why, managers))
            elif isinstance(action, Apply):
                applied = action.manifest["metadata"]["annotations"][APPLIED]
                wanted.setdefault(place, (applied, action.why if action.exists else "was deleted", managers))
        return {place for place, said in wanted.items() if not self.contests.may_write(key, place, *said)}

    async def _unless_refused(self, deployment: LLMDeployment, action: Apply | Repair | Delete) -> None:
        """What was refused a moment ago is refused again without asking, as long as it is the very same."""
        key, (place, what) = (deployment.namespace, deployment.name), _identity(action)
        self.refusals.check(key, place, what)
        began = time.monotonic()
        try:
            await self._carry_out(deployment, action)
        except (ApiError, NameTaken, *TRANSPORT_ERRORS) as error:
            if not (isinstance(error, ApiError) and error.is_namespace_leaving):
                final = not is_passing(error)
                how = "refused" if final else "not done for now"
                logger.warning("%s/%s: %s %s: %s: %s", *key, *place, how, str(error) or type(error).__name__)
                self.refusals.note(key, place, what, error, final, time.monotonic() - began)
            raise
        self.refusals.forget(key, place)

    async def _carry_out(self, deployment: LLMDeployment, action: Apply | Repair | Delete) -> None:
        self._check_lead()
        match action:
            case Repair():
                await self._repair(action)
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

    async def _repair(self, repair: Repair) -> None:
        """Of the very version that was looked at. Raises ChangedMeanwhile."""
        target = repair.target
        logger.info("%s/%s: %s: put right: %s", target.namespace, target.name, target.kind, repair.why)
        operations = [
            {"op": "replace", "path": "/metadata/resourceVersion", "value": target.resource_version},
            {"op": "replace", "path": "/spec", "value": repair.spec},
        ]
        try:
            answer = await self._cluster.json_patch(
                target.kind, target.namespace, target.name, operations, FIELD_MANAGER
            )
        except ApiError as error:
            if error.status in (404, 409):
                raise ChangedMeanwhile(f"{target.kind} {target.name}") from error
            raise
        self._store.put(Observed.of(target.kind, target.api_version, answer))

    async def claim(self, body: Json, operator: str) -> Json:
        """Says that `operator` serves the LLMDeployment, unless it has changed since it was seen: HTTP 409."""
        self._check_lead()
        meta = {name: body["metadata"][name] for name in ("name", "namespace", "resourceVersion")}
        status = {**(body.get("status") or {}), "operator": operator}
        manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": meta, "status": status}
        answer = await self._cluster.apply(manifest, FIELD_MANAGER, "status")
        self._store.put(Observed.of(KIND, API_VERSION, answer))
        return answer

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


def _identity(action: Apply | Repair | Delete) -> tuple[Place, str]:
    """The object that it is about, and what tells it from another action on the same."""
    match action:
        case Apply(manifest, _, exists):
            meta = manifest["metadata"]
            return (manifest["kind"], meta["name"]), f"apply {meta['annotations'][APPLIED]} {exists}"
        case Repair(target, spec, _, _):
            return (target.kind, target.name), f"repair {digest(spec)}"
        case Delete(target):
            return (target.kind, target.name), f"delete {target.uid}"
