"""Executes plans: the only writes to the cluster besides the Lease and the metrics API's registration."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from octavo_operator.api import API_VERSION, FIELD_MANAGER, Key, Owner
from octavo_operator.diff import digest
from octavo_operator.kube.client import TRANSPORT_ERRORS, ApiError, KubeClient
from octavo_operator.kube.rejected_writes import RejectedWrites
from octavo_operator.kube.resources import RESOURCES
from octavo_operator.kube.store import ObjectRef, Observed, Store
from octavo_operator.observed.diagnosis import Event
from octavo_operator.render.names import TOKEN_KEY
from octavo_operator.writes.field_conflicts import FieldConflicts
from octavo_operator.writes.plan import (
    APPLIED,
    Action,
    Annotate,
    Apply,
    CreateToken,
    Delete,
    Evict,
    Plan,
    RemoveForeignFields,
    ownership_of,
)
from octavo_operator.writes.rejections import NameConflictError, is_transient

logger = logging.getLogger("octavo.operator.apply")

Json = dict[str, Any]


# No pods without their network policy, nor with a service account of this name that is not ours.
_BEFORE_PODS = ("NetworkPolicy", "ServiceAccount")
_WITH_PODS = ("Deployment", "LeaderWorkerSet")


class TerminatingError(Exception):
    """An object of one of our names, or its kind, is being deleted: retry soon."""


class StaleObjectError(Exception):
    """An object has changed since it was observed: retry."""


class NotLeaderError(Exception):
    """We may have lost the Lease: nothing is written."""


WriteError = ApiError | NameConflictError | TerminatingError | StaleObjectError


class Applier:
    """Writes children, status and events. `may_write`: whether we are the leader; called before each write."""

    def __init__(self, client: KubeClient, store: Store, may_write: Callable[[], bool]) -> None:
        self._client, self._store, self._may_write = client, store, may_write
        self._numbers = itertools.count(time.time_ns())
        self.rejected_writes = RejectedWrites(time.monotonic)
        self.field_conflicts = FieldConflicts(time.monotonic)

    async def execute(self, owner: Owner, plan: Plan) -> list[WriteError]:
        """Executes all actions in order, whether or not some are rejected. Returns the errors.

        Raises TRANSPORT_ERRORS and NotLeaderError, and ApiError where the other writes would only add to the API
        server's load.
        """
        errors: list[WriteError] = []
        prerequisite_failed = False
        key = owner.key
        self.rejected_writes.retain(key, {_identity(action)[0] for action in plan.actions})
        conflicting, written = self._conflicting(key, plan), set[ObjectRef]()
        for action in plan.actions:
            ref = _identity(action)[0]
            kind = action.manifest["kind"] if isinstance(action, Apply) else None
            if ref in conflicting:
                prerequisite_failed |= isinstance(action, Apply) and kind in _BEFORE_PODS and not action.exists
                continue
            if errors and isinstance(action, Annotate):
                continue
            if prerequisite_failed and kind in _WITH_PODS and isinstance(action, Apply) and not action.exists:
                continue
            try:
                await self._write_unless_rejected(owner, action)
            except ApiError as error:
                if error.status == 429 or error.is_namespace_terminating:
                    raise
                errors.append(error)
            except (NameConflictError, TerminatingError) as error:
                errors.append(error)
            except StaleObjectError as error:
                errors.append(error)
                conflicting.add(ref)  # other actions on it are out of date, too
            else:
                if ref not in written:
                    written.add(ref)
                    self.field_conflicts.record_write(key, ref)
                continue
            prerequisite_failed |= kind in _BEFORE_PODS
        return errors

    def _conflicting(self, key: Key, plan: Plan) -> set[ObjectRef]:
        """Objects that others keep changing or deleting, and that are not to be written yet."""
        wanted: dict[ObjectRef, tuple[str, str, tuple[str, ...]]] = {}
        for action in plan.actions:
            ref = _identity(action)[0]
            target = self._store.get(ref[0], key[0], ref[1])
            managers = target.managers if target else ()
            if isinstance(action, RemoveForeignFields):
                wanted.setdefault(ref, (action.applied, action.why, managers))
            elif isinstance(action, Apply):
                applied = action.manifest["metadata"]["annotations"][APPLIED]
                wanted.setdefault(ref, (applied, action.why if action.exists else "was deleted", managers))
        return {ref for ref, details in wanted.items() if not self.field_conflicts.may_write(key, ref, *details)}

    async def _write_unless_rejected(self, owner: Owner, action: Action) -> None:
        """Raises the earlier error, without a request, while an identical write is in backoff."""
        key, (ref, request) = owner.key, _identity(action)
        self.rejected_writes.check(key, ref, request)
        began = time.monotonic()
        try:
            await self._write(owner, action)
        except (ApiError, NameConflictError, *TRANSPORT_ERRORS) as error:
            if not (isinstance(error, ApiError) and error.is_namespace_terminating):
                final = not is_transient(error)
                how = "rejected" if final else "failed, will be retried"
                logger.warning("%s/%s: writing %s %s %s: %s", *key, *ref, how, str(error) or type(error).__name__)
                self.rejected_writes.record(key, ref, request, error, final, time.monotonic() - began)
            raise
        self.rejected_writes.forget(key, ref)

    async def _write(self, owner: Owner, action: Action) -> None:
        self._check_leader()
        match action:
            case RemoveForeignFields():
                await self._remove_foreign_fields(action)
            case Apply(manifest, why, exists):
                await self._apply(owner, manifest, why, exists)
            case Annotate(target, annotations):
                await self._annotate(target, annotations)
            case CreateToken(manifest):
                await self._create_token(owner, manifest)
            case Evict(pod):
                await self._evict(owner, pod)
            case Delete(target):
                logger.info("%s/%s: deleting %s %s", *owner.key, target.kind, target.name)
                await self._client.delete(target.kind, target.namespace, target.name, target.uid)

    def _check_leader(self) -> None:
        if not self._may_write():
            raise NotLeaderError

    async def _apply(self, owner: Owner, manifest: Json, why: str, exists: bool) -> None:
        kind, meta = manifest["kind"], manifest["metadata"]
        if not exists:
            # Watches select by our label: never take over an object without it.
            found = await self._client.get(kind, meta["namespace"], meta["name"])
            whose = ownership_of(found, owner) if found else "ours"
            if whose == "foreign":
                raise NameConflictError(f"{kind} {meta['name']}")
            if whose == "terminating":
                raise TerminatingError(f"{kind} {meta['name']}")
        try:
            answer = await self._client.apply(manifest, FIELD_MANAGER)
        except ApiError as error:
            if error.is_kind_missing:
                raise TerminatingError(f"{kind}: {error.message}") from error
            raise
        self._store.put(Observed.of(kind, manifest["apiVersion"], answer))
        logger.info("%s/%s: %s %s: %s", *owner.key, kind, meta["name"], why)

    async def _remove_foreign_fields(self, action: RemoveForeignFields) -> None:
        """Writes only the observed version of the object. Raises StaleObjectError."""
        target = action.target
        logger.info("%s/%s: %s: reverted: %s", target.namespace, target.name, target.kind, action.why)
        operations = [
            {"op": "replace", "path": "/metadata/resourceVersion", "value": target.resource_version},
            {"op": "replace", "path": "/spec", "value": action.spec},
        ]
        try:
            answer = await self._client.json_patch(
                target.kind, target.namespace, target.name, operations, FIELD_MANAGER
            )
        except ApiError as error:
            if error.status in (404, 409):
                raise StaleObjectError(f"{target.kind} {target.name}") from error
            raise
        self._store.put(Observed.of(target.kind, target.api_version, answer))

    async def _create_token(self, owner: Owner, manifest: Json) -> None:
        """Needs no right to read Secrets: one that is there already is left alone."""
        meta = manifest["metadata"]
        body = {**manifest, "stringData": {TOKEN_KEY: secrets.token_urlsafe(32)}}
        params = {"fieldManager": FIELD_MANAGER}
        try:
            await self._client.call("POST", RESOURCES["Secret"].path(meta["namespace"]), body, params=params)
        except ApiError as error:
            if error.status != 409 or error.is_namespace_terminating:
                raise
            return
        logger.info("%s/%s: Secret %s created", *owner.key, meta["name"])

    async def _evict(self, owner: Owner, pod: Json) -> None:
        """Does nothing when it is gone, or another one has its name."""
        meta = pod["metadata"]
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": meta["name"], "namespace": meta["namespace"]},
            "deleteOptions": {"preconditions": {"uid": meta["uid"]}},
        }
        try:
            await self._client.call("POST", RESOURCES["Pod"].path(meta["namespace"], meta["name"], "eviction"), body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            return
        logger.info("%s/%s: evicted %s, whose group has places for some of its pods only", *owner.key, meta["name"])

    async def _annotate(self, target: Observed, annotations: dict[str, str]) -> None:
        """Does nothing when the pod is gone, or has no annotations any more."""
        operations: list[Json] = [{"op": "test", "path": "/metadata/uid", "value": target.uid}]
        for name, value in annotations.items():
            path = f"/metadata/annotations/{name.replace('~', '~0').replace('/', '~1')}"
            operations.append({"op": "add", "path": path, "value": value})
        try:
            answer = await self._client.json_patch(
                target.kind, target.namespace, target.name, operations, FIELD_MANAGER
            )
        except ApiError as error:
            if error.status not in (404, 409, 422):
                raise
            return
        self._store.put(Observed.of(target.kind, target.api_version, answer))

    async def claim(self, body: Json, operator: str) -> Json:
        """Writes `status.operator`, if the owner `body` has not changed since it was observed (else ApiError 409)."""
        self._check_leader()
        meta = {name: body["metadata"][name] for name in ("name", "namespace", "resourceVersion")}
        status = {**(body.get("status") or {}), "operator": operator}
        manifest = {"apiVersion": API_VERSION, "kind": body["kind"], "metadata": meta, "status": status}
        answer: Json = await self._client.apply(manifest, FIELD_MANAGER, "status")
        self._store.put(Observed.of(body["kind"], API_VERSION, answer))
        return answer

    async def write_status(self, owner: Owner, status: Json) -> None:
        """Replaces our fields of the status. Raises TRANSPORT_ERRORS, ApiError and NotLeaderError."""
        self._check_leader()
        manifest = {
            "apiVersion": API_VERSION,
            "kind": owner.kind,
            "metadata": {"name": owner.name, "namespace": owner.namespace},
            "status": status,
        }
        answer = await self._client.apply(manifest, FIELD_MANAGER, "status")
        self._store.put(Observed.of(owner.kind, API_VERSION, answer))

    async def post(self, owner: Owner, event: Event) -> None:
        """Creates an event; errors are only logged."""
        now = datetime.now(UTC)
        stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{owner.name}.{next(self._numbers):x}", "namespace": owner.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": owner.kind,
                "name": owner.name,
                "namespace": owner.namespace,
                "uid": owner.uid,
            },
            "type": event.kind,
            "reason": event.reason,
            "message": event.message[:1024],
            "action": "Reconcile",
            "reportingComponent": FIELD_MANAGER,
            "reportingInstance": os.environ.get("POD_NAME") or FIELD_MANAGER,
            "source": {"component": FIELD_MANAGER},
            "count": 1,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
        try:
            await self._client.call("POST", RESOURCES["Event"].path(owner.namespace), body)
        except (*TRANSPORT_ERRORS, ApiError) as error:
            logger.debug("%s/%s: creating an event failed: %s", *owner.key, error)


def _identity(action: Action) -> tuple[ObjectRef, str]:
    """The object, and what distinguishes the action from others on it."""
    match action:
        case Apply(manifest, _, exists):
            meta = manifest["metadata"]
            return (manifest["kind"], meta["name"]), f"apply {meta['annotations'][APPLIED]} {exists}"
        case RemoveForeignFields(target, spec, _, _):
            return (target.kind, target.name), f"replace {digest(spec)}"
        case Delete(target):
            return (target.kind, target.name), f"delete {target.uid}"
        case Evict(pod):
            return ("Pod", pod["metadata"]["name"]), f"evict {pod['metadata']['uid']}"
        case CreateToken(manifest):
            return ("Secret", manifest["metadata"]["name"]), "create"
        case Annotate(target, annotations):
            return (target.kind, target.name), f"annotate {target.uid} {digest(annotations)}"
