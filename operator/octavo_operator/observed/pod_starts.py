"""Measure the start of the pod that became ready last, phase by phase: `status.start`.

A pod is asked once, when it has become ready: its events say how long its images were pulled, its status how long the
model was fetched, its metrics page how long the engine loaded it and in which format its model calls tools. What cannot
be read is left out. Nothing is asked again, so a fleet in which no pod starts costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo_operator.kube.client import TRANSPORT_ERRORS, ApiError, KubeClient
from octavo_operator.kube.resources import RESOURCES
from octavo_operator.kube.store import Key
from octavo_operator.render.names import ENGINE, FETCH
from octavo_operator.times import parse_time

logger = logging.getLogger("octavo.operator")

Json = dict[str, Any]

PHASES = {"imagePull": "image_pull", "fetch": "fetch", "load": "load", "ready": "ready"}  # names in metrics
_MAX_CONCURRENT_READS = 16
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s|us|µs|ns)")
# "Successfully pulled image "x" in 1m2.5s (1m3s including waiting)": the wait for other pulls counts, too.
_PULLED = re.compile(r"Successfully pulled image .* in ([\d.a-zµ]+)(?: \(([\d.a-zµ]+) including waiting\))?")


@dataclass(frozen=True)
class EngineStart:
    """The report of an engine that has started."""

    seconds: Mapping[str, float] = field(default_factory=dict)  # of phases
    tool_format: str | None = None  # of its model's calls


def ready_at(pod: Json) -> str | None:
    """Return when a pod became ready, as text; None if it is not, or if its engine was restarted, so that the time
    tells nothing of a start."""
    status = pod.get("status") or {}
    engine = _container(status.get("containerStatuses"), ENGINE)
    if "deletionTimestamp" in pod["metadata"] or engine.get("restartCount"):
        return None
    for one in status.get("conditions") or []:
        if (one["type"], one["status"]) == ("Ready", "True") and one.get("lastTransitionTime"):
            return str(one["lastTransitionTime"])
    return None


def start_of(pod: Json, events: Iterable[Json], engine: EngineStart) -> Json:
    """`status.start` of a pod that is ready. `events`: its own; `engine`: what its engine tells."""
    stamp = ready_at(pod) or pod["metadata"]["creationTimestamp"]
    out: Json = {"pod": pod["metadata"]["name"], "readyAt": stamp}
    pulls = [seconds for event in events if (seconds := _pull_seconds(event)) is not None]
    if pulls:
        out["imagePull"] = _rounded(sum(pulls))
    fetched = _container((pod.get("status") or {}).get("initContainerStatuses"), FETCH)
    ended = (fetched.get("state") or {}).get("terminated") or {}
    if ended.get("startedAt") and ended.get("finishedAt"):
        out["fetch"] = _rounded(parse_time(ended["finishedAt"]) - parse_time(ended["startedAt"]))
    if "load" in engine.seconds:
        out["load"] = _rounded(engine.seconds["load"])
    out["ready"] = _rounded(parse_time(stamp) - parse_time(pod["metadata"]["creationTimestamp"]))
    if engine.tool_format:
        out["toolFormat"] = engine.tool_format
    return out


def _rounded(seconds: float) -> float:
    return round(max(seconds, 0.0), 1)


def _container(statuses: list[Json] | None, name: str) -> Json:
    return next((one for one in statuses or [] if one["name"] == name), {})


def _pull_seconds(event: Json) -> float | None:
    """Return the seconds of an event that reports an image, 0 where the node had it; None for other events."""
    if event.get("reason") != "Pulled":
        return None
    match = _PULLED.search(event.get("message", ""))
    if match is None:
        return 0.0
    return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(match[2] or match[1]))


async def _nothing(_: Json) -> EngineStart:
    return EngineStart()


class PodStarts:
    """`changed` is called with a key whose `last` is another one. `read_start`: reads what the engine of a
    pod tells of its start, nothing where that fails; set by __main__.py."""

    def __init__(self, client: KubeClient, changed: Callable[[Key], None]) -> None:
        self.read_start: Callable[[Json], Awaitable[EngineStart]] = _nothing
        self.are_supported = True  # by the CRD
        self._client, self._changed = client, changed
        self._found: dict[Key, Json] = {}
        self._seen: dict[Key, set[str]] = {}  # uids of ready pods
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT_READS)

    def last(self, key: Key, pods: Iterable[Json], recorded: Json | None) -> Json | None:
        """The last start that is known; begins to read a later one. `recorded`: in the status."""
        if not self.are_supported:
            return None
        start = self._found.get(key, recorded)
        ready = [(stamp, pod) for pod in pods if (stamp := ready_at(pod)) is not None]
        known = self._seen.get(key, set())
        self._seen[key] = {pod["metadata"]["uid"] for _, pod in ready}
        # A pod may be unready for a moment, and this process new: only what became ready since then has started.
        since = parse_time(start["readyAt"]) if start else 0.0
        fresh = [one for one in ready if one[1]["metadata"]["uid"] not in known and parse_time(one[0]) > since]
        if fresh:
            _, pod = max(fresh, key=lambda one: parse_time(one[0]))
            task = asyncio.create_task(self._read(key, pod))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return start

    def forget(self, key: Key) -> None:
        """The LLMDeployment is gone."""
        self._found.pop(key, None)
        self._seen.pop(key, None)

    async def _read(self, key: Key, pod: Json) -> None:
        async with self._slots:
            events, engine = await asyncio.gather(self._events(key[0], pod["metadata"]["uid"]), self.read_start(pod))
        before = self._found.get(key)
        start = start_of(pod, events, engine)
        if key in self._seen and (before is None or parse_time(start["readyAt"]) >= parse_time(before["readyAt"])):
            self._found[key] = start
            self._changed(key)

    async def _events(self, namespace: str, uid: str) -> list[Json]:
        params = {"fieldSelector": f"involvedObject.uid={uid},reason=Pulled", "limit": "20"}
        try:
            return list((await self._client.call("GET", RESOURCES["Event"].path(namespace), params=params))["items"])
        except (ApiError, *TRANSPORT_ERRORS) as error:
            logger.debug("reading events of a pod failed: %r", error)
            return []
