"""Events of pods that hang before their containers start: volumes that cannot be mounted, failed sandboxes, slow image
pulls. The status of such a pod says ContainerCreating only; its events say why.

Events are not watched, since clusters have many. Those of a pod are read once it has been waiting for a while.
"""

from __future__ import annotations

import logging
from typing import Any

from octavo_operator.diagnosis import Events
from octavo_operator.kube.client import TRANSPORT_ERRORS, ApiError, KubeClient
from octavo_operator.kube.resources import RESOURCES
from octavo_operator.kube.store import Key
from octavo_operator.times import parse_time

logger = logging.getLogger("octavo.operator")

Json = dict[str, Any]

HANGING_AFTER_SECONDS = 20.0
_CREATING = ("ContainerCreating", "PodInitializing")  # waiting reasons that say nothing about a cause
_CACHE_SECONDS = 15.0
_MAX_PODS = 5  # of one LLMDeployment: nearly always all hang for the same reason


def waiting_since(pod: Json) -> float | None:
    """Since when a scheduled pod has been waiting for its next container to be created; None: it is not waiting."""
    status = pod.get("status") or {}
    if "deletionTimestamp" in pod["metadata"] or status.get("phase", "Pending") != "Pending":
        return None
    scheduled: Json = next((one for one in status.get("conditions") or [] if one["type"] == "PodScheduled"), {})
    if scheduled.get("status") != "True":
        return None
    since = parse_time(scheduled.get("lastTransitionTime") or pod["metadata"]["creationTimestamp"])
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
    """Reads events, and caches them for a few seconds."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._known: dict[Key, dict[str, tuple[float, list[Json]]]] = {}
        self._is_forbidden = False

    async def read(self, key: Key, pods: list[Json], now: float) -> tuple[Events, float | None]:
        """Events of hanging pods, and seconds until they are to be read again (None: no pod is waiting)."""
        waiting = [(pod, since) for pod in pods if (since := waiting_since(pod)) is not None]
        hanging = [pod for pod, since in waiting if now - since >= HANGING_AFTER_SECONDS][:_MAX_PODS]
        known = self._known.pop(key, {})
        kept: dict[str, tuple[float, list[Json]]] = {}
        for pod in hanging:
            uid = pod["metadata"]["uid"]
            if uid in known and now - known[uid][0] < _CACHE_SECONDS:
                kept[uid] = known[uid]
            else:
                found = await self._read(key[0], uid)
                kept[uid] = (now, known[uid][1] if found is None and uid in known else found or [])
        if kept:
            self._known[key] = kept
        dues = [since + HANGING_AFTER_SECONDS - now for _, since in waiting if now - since < HANGING_AFTER_SECONDS]
        dues += [read_at + _CACHE_SECONDS - now for read_at, _ in kept.values()]
        return {uid: events for uid, (_, events) in kept.items()}, max(min(dues), 0.0) + 0.1 if dues else None

    def forget(self, key: Key) -> None:
        """The LLMDeployment is gone."""
        self._known.pop(key, None)

    async def _read(self, namespace: str, uid: str) -> list[Json] | None:
        """None: they could not be read."""
        params = {"fieldSelector": f"involvedObject.uid={uid}", "limit": "100"}
        try:
            return list((await self._client.call("GET", RESOURCES["Event"].path(namespace), params=params))["items"])
        except ApiError as error:
            if error.status == 403 and not self._is_forbidden:
                self._is_forbidden = True
                logger.warning(
                    "reading events of pods is forbidden, so the status lacks some causes: %s", error.message
                )
        except TRANSPORT_ERRORS as error:
            logger.debug("reading events of a pod failed: %r", error)
        return None
