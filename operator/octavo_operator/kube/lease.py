"""Leader election: the operator that holds the Lease reconciles, the other replicas watch and wait.

The rules are client-go's: a Lease has expired when it has not been renewed for its duration by our own clock, so clocks
of different machines are never compared. Who loses the API server writes nothing until it is back, and goes on then.

The Lease is read every few seconds, so it also tells what watches cannot: that the API server was away, and that its
store was put back to an earlier state. A watch that asks for what comes after a version of the lost future hears
nothing until the store has got there again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from octavo_operator.api import GROUP
from octavo_operator.config import OperatorConfig
from octavo_operator.kube.client import TRANSPORT_ERRORS, ApiError, KubeClient
from octavo_operator.kube.resources import RESOURCES

logger = logging.getLogger("octavo.operator.lease")

Json = dict[str, Any]

_BRIEF_SECONDS = 5.0  # watches survive it by themselves

# Annotations of a Lease: what its operator serves.
NAMESPACES_ANNOTATION, SELECTOR_ANNOTATION = f"{GROUP}/watch-namespaces", f"{GROUP}/selector"


def scope_annotations(config: OperatorConfig) -> dict[str, str]:
    """Annotations of our own Lease; other operators read them (claims.py)."""
    return {NAMESPACES_ANNOTATION: ",".join(config.watch_namespaces), SELECTOR_ANNOTATION: config.selector}


def may_acquire(lease: Json, identity: str, unchanged_seconds: float) -> bool:
    """True if `identity` may take the Lease. `unchanged_seconds`: since it was seen to change. Pure."""
    spec = lease.get("spec") or {}
    holder = spec.get("holderIdentity")
    return not holder or holder == identity or unchanged_seconds > spec.get("leaseDurationSeconds", 15)


class LeaderElector:
    """`leading` is set while we hold the Lease. `run` returns when another has taken it: the process must end then.
    `on_break`: changes may have been missed; watches are to start anew, or (False) to list only."""

    def __init__(self, client: KubeClient, config: OperatorConfig) -> None:
        self.leading = asyncio.Event()
        self._client, self._config = client, config
        self._path = RESOURCES["Lease"].path(config.namespace)
        self._last_change: tuple[str, float] = ("", 0.0)  # resourceVersion, and when we saw it first
        self._renewed = 0.0
        self._newest = 0  # resourceVersion of the Lease
        self._away_since: float | None = None  # when the API server answered last, if it does not
        self.on_break: Callable[[bool], object] = lambda anew: None

    @property
    def is_held(self) -> bool:
        """True if we may write now. A process that was suspended has lost its Lease before it notices."""
        return self.leading.is_set() and time.monotonic() - self._renewed < self._config.lease_seconds

    async def run(self) -> None:
        """Acquires and renews the Lease; returns once another has taken it."""
        period, answered = self._config.lease_seconds / 5, time.monotonic()
        while True:
            try:
                held = await self._acquire_or_renew(period)
            except (*TRANSPORT_ERRORS, ApiError) as error:
                logger.warning("renewing the Lease failed: %s", str(error) or type(error).__name__)
                self._away_since = self._away_since or answered
                held = self.leading.is_set() and time.monotonic() - self._renewed < self._config.lease_seconds * 2 / 3
            else:
                self._note_return()
                answered = time.monotonic()
            if held and not self.leading.is_set():
                logger.info("%s is the leader", self._config.identity)
                self.leading.set()
            elif not held and self.leading.is_set():
                self.leading.clear()
                if self._away_since is None:
                    logger.error("lost the Lease; another replica may be the leader now")
                    return
                logger.error("the API server is away: nothing is written until the Lease is renewed")
            is_fresh = time.monotonic() - self._renewed < period
            await asyncio.sleep(period if held and is_fresh else min(period, 1.0))

    def _note_return(self) -> None:
        """The API server answers."""
        if self._away_since is None:
            return
        seconds, self._away_since = time.monotonic() - self._away_since, None
        logger.info("the API server is back after %.0f s", seconds)
        self.on_break(seconds > _BRIEF_SECONDS)

    def _note_version(self, lease: Json) -> None:
        """Versions of an object only grow, unless the store was restored from a backup."""
        version = int((lease.get("metadata") or {}).get("resourceVersion") or self._newest)
        if version < self._newest:
            logger.warning(
                "the API server's store went back from version %d to %d, as a restored backup does; "
                "everything is watched anew",
                self._newest,
                version,
            )
            self.on_break(True)
        self._newest = version

    async def _acquire_or_renew(self, timeout: float) -> bool:
        name = self._config.lease_name
        lease = await self._client.get("Lease", self._config.namespace, name, timeout=timeout)
        now = time.monotonic()
        if lease is None:
            body: Json = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {
                    "name": name,
                    "namespace": self._config.namespace,
                    "annotations": scope_annotations(self._config),
                },
                "spec": self._spec({}),
            }
            self._note_version(await self._client.call("POST", self._path, body, timeout=timeout))
        else:
            self._note_version(lease)
            version = lease["metadata"]["resourceVersion"]
            if version != self._last_change[0]:
                self._last_change = (version, now)
            if not may_acquire(lease, self._config.identity, now - self._last_change[1]):
                return False
            lease["spec"] = self._spec(lease.get("spec") or {})
            lease["metadata"]["annotations"] = {
                **(lease["metadata"].get("annotations") or {}),
                **scope_annotations(self._config),
            }
            try:
                self._note_version(await self._client.call("PUT", f"{self._path}/{name}", lease, timeout=timeout))
            except ApiError as error:
                if error.status == 409:  # another replica was faster
                    return False
                raise
        self._renewed = now
        return True

    def _spec(self, previous: Json) -> Json:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_new_holder = previous.get("holderIdentity") != self._config.identity
        return {
            "holderIdentity": self._config.identity,
            "leaseDurationSeconds": int(self._config.lease_seconds),
            "renewTime": now,
            "acquireTime": now if is_new_holder else previous.get("acquireTime", now),
            "leaseTransitions": previous.get("leaseTransitions", 0) + (1 if is_new_holder else 0),
        }

    async def release(self) -> None:
        """Clears the holder, so that the next leader need not wait until the Lease expires."""
        if not self.leading.is_set():
            return
        self.leading.clear()
        try:
            lease = await self._client.get("Lease", self._config.namespace, self._config.lease_name)
            if lease and (lease.get("spec") or {}).get("holderIdentity") == self._config.identity:
                lease["spec"]["holderIdentity"] = ""
                await self._client.call("PUT", f"{self._path}/{self._config.lease_name}", lease, timeout=3)
        except (*TRANSPORT_ERRORS, ApiError) as error:
            logger.warning("releasing the Lease failed: %s", error)
