"""Read the events of pods that hang: volumes that cannot be mounted, failed sandboxes, slow image pulls, nodes that do
not answer. The status of such a pod says ContainerCreating only, or that it is not ready; its events and its node say
why. Where pods are never created, the events of their controllers say why (hanging.py).

Events and nodes are not watched, since clusters have many. They are read once a pod has been waiting for a while.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from octavo_operator.kube.client import TRANSPORT_ERRORS, ApiError, KubeClient
from octavo_operator.kube.resources import RESOURCES
from octavo_operator.kube.store import Key
from octavo_operator.observed.diagnosis import NODE_NOT_READY, Events
from octavo_operator.observed.hanging import SILENT_AFTER_SECONDS, Subject, hanging_pods, node_remark, silence_remark

logger = logging.getLogger("octavo.operator")

Json = dict[str, Any]

_CACHE_SECONDS = 15.0
_MAX_SUBJECTS = 5  # of one LLMDeployment: nearly always all hang for the same reason


class PodEvents:
    """Reads events, and caches them for a few seconds."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._known: dict[Key, dict[str, tuple[float, list[Json]]]] = {}
        self._forbidden: set[str] = set()  # kinds

    async def read(
        self, key: Key, pods: list[Json], now: float, pod_controllers: Sequence[Subject] = ()
    ) -> tuple[Events, float | None]:
        """Return the events of hanging pods and of `pod_controllers`, and seconds until they are to be read again
        (None: nothing hangs)."""
        waiting = [*hanging_pods(pods), *pod_controllers]
        hanging = [one for one in waiting if now >= one.due][:_MAX_SUBJECTS]
        known = self._known.pop(key, {})
        kept: dict[str, tuple[float, list[Json]]] = {}
        for one in hanging:
            before = known.get(one.key)
            if before and now - before[0] < _CACHE_SECONDS:
                kept[one.key] = before
            else:
                found = await self._read(key[0], one.selector)
                events = found if found is not None else _without_remarks(before[1] if before else [])
                kept[one.key] = (now, [*events, *await self._remarks(one, events, now)])
        if kept:
            self._known[key] = kept
        dues = [one.due - now for one in waiting if one.due > now]
        dues += [read_at + _CACHE_SECONDS - now for read_at, _ in kept.values()]
        dues += [late for one in hanging if one.pod and (late := one.since + SILENT_AFTER_SECONDS - now) > 0]
        return {uid: events for uid, (_, events) in kept.items()}, max(min(dues), 0.0) + 0.1 if dues else None

    def forget(self, key: Key) -> None:
        """The LLMDeployment is gone."""
        self._known.pop(key, None)

    async def _remarks(self, one: Subject, events: list[Json], now: float) -> list[Json]:
        """Return the operator's own remarks on a pod."""
        if one.pod is None:
            return []
        stamp = datetime.fromtimestamp(int(one.since), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        remarks = [silence_remark(one, events, stamp, now)]
        if name := (one.pod.get("spec") or {}).get("nodeName"):
            stopped = (one.pod.get("status") or {}).get("phase") == "Running" and remarks[0] is None
            remarks.append(node_remark(name, await self._node(name), stopped))
        return [{**remark, _OURS: True} for remark in remarks if remark]

    async def _node(self, name: str) -> Json | None:
        """{}: there is none; None: it could not be read."""
        try:
            return await self._client.get("Node", "", name) or {}
        except (*TRANSPORT_ERRORS, ApiError) as error:
            self._note("nodes", error)
        return None

    async def _read(self, namespace: str, selector: str) -> list[Json] | None:
        """None: they could not be read."""
        params = {"fieldSelector": selector, "limit": "100"}
        try:
            found = await self._client.call("GET", RESOURCES["Event"].path(namespace), params=params)
        except (*TRANSPORT_ERRORS, ApiError) as error:
            self._note("events of pods", error)
            return None
        # A node that was not ready an hour ago may be; what it is now is read.
        return [one for one in found["items"] if one.get("reason") != NODE_NOT_READY]

    def _note(self, what: str, error: Exception) -> None:
        if not isinstance(error, ApiError) or error.status != 403:
            logger.debug("reading %s failed: %r", what, error)
        elif what not in self._forbidden:
            self._forbidden.add(what)
            logger.warning("reading %s is forbidden, so the status lacks some causes: %s", what, error.message)


_OURS = "octavo"  # marks remarks among events


def _without_remarks(events: list[Json]) -> list[Json]:
    return [one for one in events if _OURS not in one]
