"""Find pods that hang, since when, and words for those whose events say nothing. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo_operator.kube.store import Observed
from octavo_operator.observed.children import pods_of
from octavo_operator.observed.diagnosis import GATES_NOT_READY, NODE_NOT_READY, Events, is_finished, last_event
from octavo_operator.render import names
from octavo_operator.render.workload import KIND as GROUPS
from octavo_operator.times import parse_time

Json = dict[str, Any]

HANGING_AFTER_SECONDS = 20.0
SILENT_AFTER_SECONDS = 45.0  # without an event that says what a pod waits for
_CREATING = ("ContainerCreating", "PodInitializing")  # waiting reasons that say nothing about a cause
_PULLING = "Pulling"


@dataclass(frozen=True)
class Subject:
    """An object whose events are read. `key`: in Events; `selector`: of its events; `since`: when it began to hang;
    `due`: when its events are to be read; `pod`: None for a controller that creates pods."""

    key: str
    selector: str
    since: float
    due: float
    pod: Json | None = None


def hanging_pods(pods: Iterable[Json]) -> list[Subject]:
    """The pods that may hang."""
    return [one for pod in pods if (one := _hanging(pod))]


def _hanging(pod: Json) -> Subject | None:
    uid = pod["metadata"].get("uid", "")

    def subject(since: float, patience: float) -> Subject:
        return Subject(uid, f"involvedObject.uid={uid}", since, since + patience, pod)

    if stamp := pod["metadata"].get("deletionTimestamp"):  # with the grace period
        bound = (pod.get("spec") or {}).get("nodeName") and not is_finished(pod)
        return subject(parse_time(stamp), HANGING_AFTER_SECONDS) if bound else None
    if stamp := _stopped_since(pod):  # it ran, and its node says so no longer
        return subject(parse_time(stamp), 0.0)
    if (since := waiting_since(pod)) is not None:
        return subject(since, HANGING_AFTER_SECONDS)
    return None


def _conditions(body: Json) -> dict[str, Json]:
    return {one["type"]: one for one in (body.get("status") or {}).get("conditions") or []}


def _stopped_since(pod: Json) -> str | None:
    """Return since when a pod whose containers are ready is not: its node is silent, or a readiness gate is closed."""
    known = _conditions(pod)
    ready, containers = known.get("Ready", {}), known.get("ContainersReady", {})
    if (ready.get("status"), containers.get("status")) != ("False", "True") and ready.get("status") != "Unknown":
        return None
    stamp: str | None = ready.get("lastTransitionTime") or pod["metadata"].get("creationTimestamp")
    return stamp


def waiting_since(pod: Json) -> float | None:
    """Return since when a pod has been waiting for a scheduler to look at it, or for its next container to be created;
    None if it is not waiting."""
    status = pod.get("status") or {}
    if "deletionTimestamp" in pod["metadata"] or status.get("phase", "Pending") != "Pending":
        return None
    scheduled = _conditions(pod).get("PodScheduled")
    if scheduled is None and not (pod.get("spec") or {}).get("nodeName"):
        stamp = pod["metadata"].get("creationTimestamp")
        return parse_time(stamp) if stamp else None
    if scheduled is None or scheduled.get("status") != "True":
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


def pod_controllers(children: Sequence[Observed]) -> list[Subject]:
    """Controllers that make fewer pods than they should, and say why by events alone: Jobs, and the StatefulSets of a
    LeaderWorkerSet."""
    found = []
    for one in children:
        if one.kind == "Job" and not pods_of(children, names.PREFETCH):
            found.append(_pod_controller("Job", one.name, one.body))
        elif one.kind == GROUPS:
            found += _sets_of(one, children)
    return found


def _sets_of(group: Observed, children: Sequence[Observed]) -> list[Subject]:
    """The StatefulSet of the leaders, and that of the workers of each leader: it has the leader's name."""
    body = group.body
    spec, found = body.get("spec") or {}, []
    size = (spec.get("leaderWorkerTemplate") or {}).get("size", 1)
    leaders = [pod for pod in pods_of(children) if not is_finished(pod)]
    if len(leaders) < spec.get("replicas", 1):
        found.append(_pod_controller("StatefulSet", group.name, body))
    workers = [pod["metadata"]["name"] for pod in pods_of(children, names.WORKER) if not is_finished(pod)]
    for leader in leaders:
        name = leader["metadata"]["name"]
        if sum(worker.startswith(f"{name}-") for worker in workers) < size - 1:
            found.append(_pod_controller("StatefulSet", name, leader))
    return found


def _pod_controller(kind: str, name: str, of: Json) -> Subject:
    stamp = of["metadata"].get("creationTimestamp") or "1970-01-01T00:00:00Z"
    selector = f"involvedObject.kind={kind},involvedObject.name={name}"
    return Subject(f"{kind}/{name}", selector, parse_time(stamp), parse_time(stamp))


def events_of_controllers(kind: str, events: Events) -> list[Json]:
    """The events of controllers of this kind."""
    return [one for key, told in events.items() if key.startswith(f"{kind}/") for one in told]


def node_remark(name: str, node: Json | None, stopped: bool) -> Json | None:
    """Return an event that tells of a hanging pod's node; None if there is nothing to tell. `node`: {} if there is
    none, None if it could not be read; `stopped`: the pod ran, and is ready no more, though its containers were."""
    if node is None:
        text = f"node {name} no longer says that the pod is ready: `kubectl describe node {name}`" if stopped else ""
    elif not node:
        text = f"node {name} is gone"
    else:
        ready = _conditions(node).get("Ready", {"status": "Unknown", "message": "it has never answered"})
        since = f" since {ready['lastTransitionTime']}" if "lastTransitionTime" in ready else ""
        text = "" if ready["status"] == "True" else f"node {name} is not ready{since}: {ready.get('message', '')}"
    return {"type": "Warning", "reason": NODE_NOT_READY, "message": text} if text else None


def silence_remark(subject: Subject, events: Sequence[Json], stamp: str, now: float) -> Json | None:
    """Return an event for a pod that has hung for long; None if its events say what it waits for. `stamp`: since
    when."""
    if now - subject.since < SILENT_AFTER_SECONDS or subject.pod is None:
        return None
    pod, last = subject.pod, last_event(events)
    if last and (last.get("type") == "Warning" or last.get("reason") == _PULLING):
        return None
    ready = _conditions(pod).get("Ready", {})
    if ready.get("reason") == GATES_NOT_READY:
        return {"type": "Warning", "reason": GATES_NOT_READY, "message": ready.get("message", "")}
    if _stopped_since(pod) or "deletionTimestamp" in pod["metadata"]:
        return None
    name = pod["metadata"].get("name", "")
    if (pod.get("spec") or {}).get("nodeName"):
        said = f"; its last event is {last.get('reason')}: {last.get('message', '')}" if last else ""
        text = f"pod {name} has waited since {stamp} for its node to start it, and no event says why{said}"
    else:
        scheduler = (pod.get("spec") or {}).get("schedulerName", "default-scheduler")
        text = f"no scheduler has considered pod {name} since {stamp}; check that {scheduler} runs"
    when: Json = {one: last[one] for one in ("lastTimestamp", "eventTime", "series") if last and one in last}
    return {"type": "Warning", "reason": "Waiting", "message": text, **when}
