"""One operator at a time: whoever holds the Lease works, the others watch and wait.

The rules are those of client-go's leader election: a Lease has expired when nobody has renewed it for its duration by
our own clock, so clocks of different machines are never compared.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import Any

from octavo_operator.claims import scope
from octavo_operator.config import OperatorConfig
from octavo_operator.kube.client import RESOURCES, TRANSPORT_ERRORS, ApiError, Cluster

logger = logging.getLogger("octavo.operator.lease")

Json = dict[str, Any]


def may_take(lease: Json, identity: str, unchanged_seconds: float) -> bool:
    """Whether the Lease is free for us; `unchanged_seconds`: how long we have seen it as it is. Pure."""
    spec = lease.get("spec") or {}
    holder = spec.get("holderIdentity")
    return not holder or holder == identity or unchanged_seconds > spec.get("leaseDurationSeconds", 15)


class LeaseHolder:
    """`leading` is set while we hold the Lease. `run` returns when it was lost: the process must end then."""

    def __init__(self, cluster: Cluster, config: OperatorConfig) -> None:
        self.leading = asyncio.Event()
        self._cluster, self._config = cluster, config
        self._path = RESOURCES["Lease"].path(config.namespace)
        self._seen: tuple[str, float] = ("", 0.0)  # resourceVersion, and since when
        self._renewed = 0.0

    @property
    def is_held(self) -> bool:
        """Whether we may write now. A process that was frozen has lost its Lease before it learns of it."""
        return self.leading.is_set() and time.monotonic() - self._renewed < self._config.lease_seconds

    async def run(self) -> None:
        period = self._config.lease_seconds / 5
        while True:
            try:
                held = await self._try(period)
            except (*TRANSPORT_ERRORS, ApiError) as error:
                logger.warning("the Lease cannot be renewed: %s", str(error) or type(error).__name__)
                held = self.leading.is_set() and time.monotonic() - self._renewed < self._config.lease_seconds * 2 / 3
            if held and not self.leading.is_set():
                logger.info("%s leads", self._config.identity)
                self.leading.set()
            elif not held and self.leading.is_set():
                self.leading.clear()
                logger.error("the Lease was lost; another operator may lead now")
                return
            is_fresh = time.monotonic() - self._renewed < period
            await asyncio.sleep(period if held and is_fresh else min(period, 1.0))

    async def _try(self, seconds: float) -> bool:
        name = self._config.lease_name
        lease = await self._cluster.get("Lease", self._config.namespace, name, timeout=seconds)
        now = time.monotonic()
        if lease is None:
            body: Json = {
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {
                    "name": name, "namespace": self._config.namespace, "annotations": scope(self._config),
                },
                "spec": self._spec({}),
            }  # fmt: skip
            await self._cluster.call("POST", self._path, body, timeout=seconds)
        else:
            version = lease["metadata"]["resourceVersion"]
            if version != self._seen[0]:
                self._seen = (version, now)
            if not may_take(lease, self._config.identity, now - self._seen[1]):
                return False
            lease["spec"] = self._spec(lease.get("spec") or {})
            lease["metadata"]["annotations"] = {**(lease["metadata"].get("annotations") or {}), **scope(self._config)}
            try:
                await self._cluster.call("PUT", f"{self._path}/{name}", lease, timeout=seconds)
            except ApiError as error:
                if error.status == 409:  # another one was faster
                    return False
                raise
        self._renewed = now
        return True

    def _spec(self, before: Json) -> Json:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        taken = before.get("holderIdentity") != self._config.identity
        return {
            "holderIdentity": self._config.identity,
            "leaseDurationSeconds": int(self._config.lease_seconds),
            "renewTime": now,
            "acquireTime": now if taken else before.get("acquireTime", now),
            "leaseTransitions": before.get("leaseTransitions", 0) + (1 if taken else 0),
        }

    async def release(self) -> None:
        """Lets the next one start at once instead of after the Lease's duration."""
        if not self.leading.is_set():
            return
        self.leading.clear()
        try:
            lease = await self._cluster.get("Lease", self._config.namespace, self._config.lease_name)
            if lease and (lease.get("spec") or {}).get("holderIdentity") == self._config.identity:
                lease["spec"]["holderIdentity"] = ""
                await self._cluster.call("PUT", f"{self._path}/{self._config.lease_name}", lease, timeout=3)
        except (*TRANSPORT_ERRORS, ApiError) as error:
            logger.warning("the Lease could not be given back: %s", error)
