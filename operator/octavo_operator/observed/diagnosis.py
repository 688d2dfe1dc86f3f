"""Diagnose pods that do not serve: a reason for scripts, and a message with the way out for people. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo_operator.api.common import GATEWAY_LABEL
from octavo_operator.render.names import ENGINE, FETCH, PICKER, ROUTER
from octavo_operator.times import parse_time

Json = dict[str, Any]
Events = Mapping[str, list[Json]]  # of pods, by uid


@dataclass(frozen=True)
class Event:
    """An event of an LLMDeployment, as `kubectl describe` shows it."""

    kind: str  # Normal | Warning
    reason: str
    message: str


@dataclass(frozen=True)
class Problem:
    """Reason and message of a condition."""

    reason: str
    message: str


NODE_NOT_READY, GATES_NOT_READY = "NodeNotReady", "ReadinessGatesNotReady"
# The most specific first, for when pods differ.
_BY_SEVERITY = (
    "OOMKilled",
    "Unauthorized",
    "GatedModel",
    "ModelNotFound",
    "CacheFull",
    "DownloadFailed",
    "SecretNotFound",
    "ConfigMapNotFound",
    "ImagePullBackOff",
    "CrashLoop",
    "ContainerError",
    "PVCNotFound",
    "PVCPending",
    "VolumeInUse",
    "VolumeNotMounted",
    "SandboxNotCreated",
    NODE_NOT_READY,
    GATES_NOT_READY,
    "PodNotStarted",
    "InsufficientGPU",
    "InsufficientResources",
    "SchedulingGated",
    "Unschedulable",
)


DOWNLOAD = frozenset({"GatedModel", "Unauthorized", "ModelNotFound", "CacheFull", "DownloadFailed"})  # reasons
NO_PLACE = frozenset({"InsufficientGPU", "InsufficientResources", "Unschedulable"})  # reasons


def most_severe(problems: list[Problem]) -> Problem | None:
    """The one to report when pods differ."""
    return min(problems, key=lambda problem: _BY_SEVERITY.index(problem.reason), default=None)


def diagnose(pod: Json, gpu_resource: str | None = None, events: Sequence[Json] = ()) -> Problem | None:
    """Return what keeps `pod` from serving; None if it serves, is starting or terminating. `events`: of this pod, if it
    hangs; `gpu_resource`: the extended resource that it requests."""
    status = pod.get("status") or {}
    if is_finished(pod):
        return None
    if lost := next((one for one in events if one.get("reason") == NODE_NOT_READY), None):
        return _diagnose_event(lost)  # whatever the pod's status says: nobody keeps it current
    if "deletionTimestamp" in pod["metadata"]:
        return None
    for container in status.get("initContainerStatuses") or []:
        if found := _diagnose_container(container, pod):
            return found
    for container in status.get("containerStatuses") or []:
        if found := _diagnose_container(container, pod):
            return found
    if (last := last_event(events)) and last.get("type") == "Warning":
        return _diagnose_event(last)
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _unschedulable(condition, gpu_resource)
    return None


def is_finished(pod: Json) -> bool:
    """True if the pod has ended (evicted, its node shut down): it is kept as a record and was replaced by another."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def eviction_problem(pods: list[Json]) -> Problem | None:
    """The last eviction of a replica, unless a pod created since then is ready."""
    found = [pod for pod in pods if is_finished(pod) and pod["status"].get("reason") == "Evicted"]
    if not found:
        return None
    last = max(found, key=_ended_at)
    since = _ended_at(last)
    for pod in pods:
        conditions = {one["type"]: one["status"] for one in (pod.get("status") or {}).get("conditions") or []}
        if conditions.get("Ready") == "True" and parse_time(pod["metadata"]["creationTimestamp"]) >= since:
            return None
    message = last["status"].get("message", "")
    return Problem("Evicted", f"the node evicted a replica; {_eviction_advice(message)}. Message: {_short(message)}")


def _ended_at(pod: Json) -> float:
    stamps = [one["lastTransitionTime"] for one in pod["status"].get("conditions") or [] if "lastTransitionTime" in one]
    return max(parse_time(stamp) for stamp in [*stamps, pod["metadata"]["creationTimestamp"]])


def _eviction_advice(message: str) -> str:
    if volume := re.search(r'EmptyDir volume "([^"]+)"', message):
        field = {"cache": "model.cache.sizeLimit", "shm": "shm.size"}.get(volume[1], "the limit of that volume")
        return f"raise {field}"
    if "ephemeral" in message:
        return "keep models in a claim (model.cache.mode pvc), or request ephemeral-storage in resources.requests"
    if "memory" in message:
        return "raise resources.requests.memory to the actual usage"
    return "`kubectl describe node` shows which resource ran out"


CLAIM_GRACE_SECONDS = 15.0  # for provisioning a volume


def claim_pending(claim: Json | None, pods: list[Json], now: float) -> tuple[Problem | None, float | None]:
    """The problem when a pod waits only for the cache's volume, or seconds until it would be one.

    The scheduler reports nothing then: it has chosen a node, and waits for the provisioner.
    """
    if claim is None or (claim.get("status") or {}).get("phase", "Pending") != "Pending":
        return None, None
    ages = [
        now - parse_time(pod["metadata"]["creationTimestamp"])
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
        and not (pod.get("spec") or {}).get("nodeName")
        and not any(one["type"] == "PodScheduled" for one in (pod.get("status") or {}).get("conditions") or [])
    ]
    if not ages:
        return None, None
    if max(ages) < CLAIM_GRACE_SECONDS:
        return None, CLAIM_GRACE_SECONDS - max(ages)
    name = claim["metadata"]["name"]
    text = (
        f"the PersistentVolumeClaim {name} has had no volume for {CLAIM_GRACE_SECONDS:.0f} s: `kubectl describe pvc "
        f"{name}` shows what its provisioner reports; check cache.pvc.storageClassName and size"
    )
    return Problem("PVCPending", text), None


def _unschedulable(condition: Json, gpu_resource: str | None) -> Problem | None:
    message, reason = condition.get("message", ""), condition.get("reason", "")
    if reason == "SchedulingGated":
        text = "the pod waits for its scheduling gates, as a queue such as Kueue sets them, to be taken away"
        return Problem(reason, f"{text}. Scheduler: {_short(message)}")
    if match := re.search(r'persistentvolumeclaim "([^"]+)" not found', message):
        return Problem(
            "PVCNotFound",
            f"there is no PersistentVolumeClaim {match[1]} in this namespace; create it or correct the spec",
        )
    if "unbound immediate PersistentVolumeClaims" in message or "didn't find available persistent volumes" in message:
        return Problem(
            "PVCPending",
            "the cache's PersistentVolumeClaim is not bound: does its storage class exist (`kubectl get "
            "storageclass`), "
            f"and what does `kubectl describe pvc` say? Scheduler: {_short(message)}",
        )
    if gpu_resource and f"Insufficient {gpu_resource}" in message:
        return Problem(
            "InsufficientGPU",
            f"no node has enough free {gpu_resource}; free some, add a node, or lower replicas or accelerator.count. "
            f"Scheduler: {_short(message)}",
        )
    if "Insufficient" in message or "Too many pods" in message:
        return Problem(
            "InsufficientResources",
            f"no node has enough free resources for a replica; lower resources.requests or add a node. Scheduler: "
            f"{_short(message)}",
        )
    return Problem(
        "Unschedulable", f"no node is eligible for the pod; see spec.scheduling. Scheduler: {_short(message)}"
    )


_IMAGE = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
)


_USUAL_WAITS = ("ContainerCreating", "PodInitializing", "CrashLoopBackOff")  # of which more is known elsewhere


def image_pull_progress(events: Sequence[Json]) -> str | None:
    """The image pull that a hanging pod waits for; None: it waits for something else."""
    last = last_event(events)
    if last is None or last.get("reason") != "Pulling":
        return None
    since = last.get("firstTimestamp") or last.get("eventTime") or ""
    return f"{_short(last.get('message', ''))} since {since}; a large image takes minutes"


def last_event(events: Sequence[Json]) -> Json | None:
    """The event that explains what a pod waits for now; None: there is none. Among events of the same second a warning
    wins."""
    found = [one for one in events if one.get("reason") not in ("Scheduled", "SandboxChanged")]
    return max(found, key=lambda one: (event_time(one), one.get("type") == "Warning"), default=None)


def event_time(event: Json) -> float:
    """Return when it happened last, in seconds."""
    series = event.get("series") or {}
    stamps = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return max((int(parse_time(stamp)) for stamp in stamps if stamp), default=0)


def _diagnose_event(event: Json) -> Problem:
    reason, message = event.get("reason", ""), event.get("message", "")
    for kind, label in (("secret", "Secret"), ("configmap", "ConfigMap")):
        if match := re.search(rf'{kind} "([^"]+)" not found', message, re.IGNORECASE):
            return _not_found(label, f"there is no {label} {match[1].rpartition('/')[2]}")
    if match := re.search(r'persistentvolumeclaim "([^"]+)" not found', message):
        return Problem("PVCNotFound", f"there is no PersistentVolumeClaim {match[1]} in this namespace; create it")
    if "Multi-Attach error" in message:
        return Problem(
            "VolumeInUse",
            "a volume is attached to another node, and its access mode allows only one; wait until the pod there is "
            f"gone, or use a ReadWriteMany claim. {_short(message)}",
        )
    if reason in ("FailedMount", "FailedAttachVolume", "FailedMapVolume"):
        return Problem(
            "VolumeNotMounted",
            f"a volume of the pod cannot be attached or mounted; see its claim and driver. {_short(message)}",
        )
    if reason == "FailedCreatePodSandBox":
        return Problem(
            "SandboxNotCreated",
            f"the node cannot create the pod's sandbox or network; see the node and its CNI plugin. {_short(message)}",
        )
    if reason == NODE_NOT_READY:
        way_out = "repair it, or delete it, and its pods start elsewhere"
        return Problem(reason, f"the node of a pod does not answer; {way_out}. {_short(message)}")
    if reason == GATES_NOT_READY:
        text = "the containers are ready and a readiness gate of the pod is closed; see the controller that opens it"
        return Problem(reason, f"{text}. {_short(message)}")
    return Problem("PodNotStarted", f"the pod hangs before its containers start. {reason}: {_short(message)}")


def _not_found(label: str, what: str) -> Problem:
    return Problem(f"{label}NotFound", f"{what} in this namespace; create it, and the pods will start")


def _diagnose_container(status: Json, pod: Json) -> Problem | None:
    name = status["name"]
    waiting = (status.get("state") or {}).get("waiting") or {}
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _IMAGE:
        where = "router.image in the operator's chart" if name in (ROUTER, PICKER) else "engine.image"
        return Problem(
            "ImagePullBackOff",
            f"image {status.get('image', '')} cannot be pulled; check {where} and engine.imagePullSecrets. "
            f"{reason}: {_short(message)}",
        )
    if reason == "CreateContainerConfigError":
        for kind in ("secret", "configmap"):
            if match := re.search(rf"{kind} \"([^\"]+)\" not found|key (\S+) in {kind} (\S+)", message, re.IGNORECASE):
                named = match[1] or (match[3] or "").rpartition("/")[2]
                label = "Secret" if kind == "secret" else "ConfigMap"
                what = f"there is no {label} {named}" if match[1] else f"{label} {named} has no key {match[2]}"
                return _not_found(label, what)
        return Problem("ContainerError", f"container {name} cannot be created: {_short(message)}")
    if reason in ("CreateContainerError", "RunContainerError", "StartError"):
        return Problem("ContainerError", f"container {name} cannot be started: {_short(message)}")
    if reason and reason not in _USUAL_WAITS:
        return Problem("PodNotStarted", f"container {name} waits. {reason}: {_short(message)}")
    terminated = (status.get("state") or {}).get("terminated") or (status.get("lastState") or {}).get("terminated")
    if status.get("ready") or not terminated or (name == FETCH and terminated.get("exitCode") == 0):
        return None
    if terminated.get("reason") == "OOMKilled":
        return _out_of_memory(name, pod)
    if name == FETCH:
        return _diagnose_download(terminated)
    if (
        name == ENGINE
        and reason != "CrashLoopBackOff"
        and status.get("restartCount", 0) < 2
        and terminated.get("exitCode") in (0, 143)
    ):
        return None  # one requested termination
    restarts = _restarts(status.get("restartCount", 0))
    return Problem(
        "CrashLoop",
        f"container {name} ended with exit code {terminated.get('exitCode')}{restarts}; `kubectl logs --previous` "
        f"shows its log. Last line: {_short(_last_line(terminated))}",
    )


def _restarts(count: int) -> str:
    return ("", " and was restarted once")[count] if count < 2 else f" and was restarted {count} times"


def _out_of_memory(name: str, pod: Json) -> Problem:
    """Names the limit that was exceeded: the spec's, a LimitRange's default, or the node's memory."""
    what = {FETCH: "the download", ROUTER: "a router", PICKER: "a router's picker"}.get(name, "the engine")
    routing = "routing" if GATEWAY_LABEL in (pod["metadata"].get("labels") or {}) else "routing.prefix"
    field = {ROUTER: f"{routing}.resources", PICKER: f"{routing}.pickerResources"}.get(name, "resources")
    spec = pod.get("spec") or {}
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    found = next((one for one in containers if one["name"] == name), None)
    limit = (((found or {}).get("resources") or {}).get("limits") or {}).get("memory")
    # "LimitRanger plugin set: cpu, memory request for container engine; memory limit for init container fetch"
    defaulted = (pod["metadata"].get("annotations") or {}).get("kubernetes.io/limit-ranger", "").partition(": ")[2]
    clause = rf"(.*, )?memory(, .*)? limit for (init )?container {re.escape(name)}"
    if any(re.fullmatch(clause, one) for one in defaulted.split("; ")):
        text = (
            f"{what} exceeded {limit} of memory, the default of the namespace's LimitRange; set {field}.limits.memory"
        )
    elif found is not None and limit is None:
        text = (
            f"{what} was killed because its node ran out of memory (it has no limit of its own); set "
            f"{field}.requests.memory to the actual usage"
        )
    elif name in (ROUTER, PICKER):
        text = f"{what} exceeded {field}.limits.memory ({limit}); raise it"
    else:
        text = f"{what} exceeded resources.limits.memory ({limit}); raise it, or lower engine.maxModelLen or maxNumSeqs"
    return Problem("OOMKilled", text)


# Messages of `octavo fetch` about models that no retry would find: there is none, or none in a supported format.
_WRONG_NAME = (
    r"there is no model|no such model|\bis no model\b|\bnot a model\b|has no (revision|file|safetensors)|"
    r"(several files match|no file matches)|holds (several|its weights)|\bis not understood\b"
)


def _diagnose_download(terminated: Json) -> Problem:
    message = _last_line(terminated)
    text = message.lower()
    if re.search(r"\bgated\b", text):
        reason, way_out = (
            "GatedModel",
            "request access on the model's page, and set model.credentialsSecretRef to a token of that account",
        )
    elif re.search(_WRONG_NAME, text):  # before 401: a hub answers that to unknown names
        reason, way_out = (
            "ModelNotFound",
            "check model.uri and model.revision; a private model needs model.credentialsSecretRef",
        )
    elif re.search(r"\b401\b|unauthori[sz]ed|invalid token|\b403\b|forbidden", text):
        reason, way_out = (
            "Unauthorized",
            "the server refuses the token or keys: check the Secret of model.credentialsSecretRef, or that of envFrom",
        )
    elif re.search(r"\b404\b|does not exist|not found", text):
        reason, way_out = "ModelNotFound", "check model.uri and model.revision"
    elif re.search(r"no space left|\bneeds .* more in ", text):
        reason, way_out = "CacheFull", "raise model.cache.pvc.size or model.cache.sizeLimit"
    else:
        reason, way_out = (
            "DownloadFailed",
            "it is retried; check the network (proxy, DNS, NetworkPolicy)",
        )
    return Problem(reason, f"the model cannot be fetched; {way_out}. {_short(message)}")


def _last_line(terminated: Json) -> str:
    lines = [line.strip() for line in (terminated.get("message") or "").splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {terminated.get('exitCode')}"


def _short(text: str, limit: int = 400) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
