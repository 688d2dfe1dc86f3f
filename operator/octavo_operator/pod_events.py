"""What the cluster says of pods that hang before their containers start: volumes that cannot be mounted, networks that
cannot be made, images that take long. Their status says ContainerCreating and no more; their events say why.

Events are not watched: a cluster has many. Those of one pod are asked for once it has been waiting for a while.
"""

from __future__ import annotations

import logging
from typing import Any

from octavo_operator.diagnosis import Events
from octavo_operator.kube.client import RESOURCES, TRANSPORT_ERRORS, ApiError, Cluster
from octavo_operator.kube.store import Key
from octavo_operator.times import parse_time

logger = logging.getLogger("octavo.operator")

Json = dict[str, Any]

HANGS_AFTER_SECONDS = 20.0
_CREATING = ("ContainerCreating", "PodInitializing")  # what containers wait for when nothing is known against them
_READ_AGAIN_SECONDS = 15.0
_MOST_PODS = 5  # of one LLMDeployment: all hang for the same reason, nearly always


def waiting_since(pod: Json) -> float | None:
    """Since when a pod that has a node waits for its next container to be created; None: it does not."""
    status = pod.get("status") or {}
    if "deletionTimestamp" in pod["metadata"] or status.get("phase", "Pending") != "Pending":
        return None
    placed: Json = next((one for one in status.get("conditions") or [] if one["type"] == "PodScheduled"), {})
    if placed.get("status") != "True":
        return None
    since = parse_time(placed.get("lastTransitionTime") or pod["metadata"]["creationTimestamp"])
    for one in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        state = one.get("state") or {}
        if ended := state.get("terminated"):
            if ended.get("exitCode") == 0:
                since = max(since, parse_time(ended["finishedAt"]) if ended.get("finishedAt") else since)
                continue
            return None
        if "running" in state and not one.get("ready"):
            return None
        if (state.get("waiting") or {}).get("reason", _CREATING[0]) not in _CREATING:
            return None
    return since


class PodEvents:
    """Keeps what was read for a few seconds."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[Key, dict[str, tuple[float, list[Json]]]] = {}
        self._is_forbidden = False

    async def read(self, key: Key, pods: list[Json], now: float) -> tuple[Events, float | None]:
        """Events of the pods that hang, and after how many seconds to look again; None: no pod waits."""
        waiting = [(pod, since) for pod in pods if (since := waiting_since(pod)) is not None]
        hanging = [pod for pod, since in waiting if now - since >= HANGS_AFTER_SECONDS][:_MOST_PODS]
        known = self._known.pop(key, {})
        kept: dict[str, tuple[float, list[Json]]] = {}
        for pod in hanging:
            uid = pod["metadata"]["uid"]
            if uid in known and now - known[uid][0] < _READ_AGAIN_SECONDS:
                kept[uid] = known[uid]
            else:
                found = await self._read(key[0], uid)
                kept[uid] = (now, known[uid][1] if found is None and uid in known else found or [])
        if kept:
            self._known[key] = kept
        dues = [since + HANGS_AFTER_SECONDS - now for _, since in waiting if now - since < HANGS_AFTER_SECONDS]
        dues += [read_at + _READ_AGAIN_SECONDS - now for read_at, _ in kept.values()]
        return {uid: events for uid, (_, events) in kept.items()}, max(min(dues), 0.0) + 0.1 if dues else None

    def forget(self, key: Key) -> None:
        self._known.pop(key, None)

    async def _read(self, namespace: str, uid: str) -> list[Json] | None:
        """None: they cannot be had now."""
        params = {"fieldSelector": f"involvedObject.uid={uid}", "limit": "100"}
        try:
            return list((await self._cluster.call("GET", RESOURCES["Event"].path(namespace), params=params))["items"])
        except ApiError as error:
            if error.status == 403 and not self._is_forbidden:
                self._is_forbidden = True
                logger.warning("events of pods cannot be read, so some causes are not told: %s", error.message)
        except TRANSPORT_ERRORS as error:
            logger.debug("events of a pod cannot be read: %r", error)
        return None
