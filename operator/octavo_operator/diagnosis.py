"""What is wrong with pods, in one word for scripts and one sentence with the way out for people. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo_operator.render.names import ENGINE, FETCH
from octavo_operator.times import parse_time

Json = dict[str, Any]
Events = Mapping[str, list[Json]]  # of pods, by their uid


@dataclass(frozen=True)
class Problem:
    reason: str
    message: str


# The most telling first, when pods differ.
_WEIGHT = (
    "OOMKilled", "Unauthorized", "GatedModel", "ModelNotFound", "CacheFull", "DownloadFailed",
    "SecretNotFound", "ConfigMapNotFound", "ImagePullBackOff", "CrashLoop", "ContainerError", "PVCNotFound",
    "PVCPending", "VolumeInUse", "VolumeNotMounted", "SandboxNotCreated", "PodNotStarted", "InsufficientGPU",
    "InsufficientResources", "Unschedulable",
)  # fmt: skip


def worst(problems: list[Problem]) -> Problem | None:
    """The one to show; pods that share it are counted by whoever writes the status."""
    return min(problems, key=lambda problem: _WEIGHT.index(problem.reason), default=None)


def diagnose(pod: Json, gpu_resource: str | None = None, events: Sequence[Json] = ()) -> Problem | None:
    """What keeps `pod` from serving, or None: it serves, is starting, or is on its way out. `events`: of this pod, read
    because it hangs."""
    status = pod.get("status") or {}
    if "deletionTimestamp" in pod["metadata"] or is_over(pod):
        return None
    for container in status.get("initContainerStatuses") or []:
        if found := _of_container(container, pod):
            return found
    for container in status.get("containerStatuses") or []:
        if found := _of_container(container, pod):
            return found
    if (last := _last_event(events)) and last.get("type") == "Warning":
        return _of_event(last)
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _unschedulable(condition, gpu_resource)
    return None


def is_over(pod: Json) -> bool:
    """It has ended for good (evicted, its node shut down) and another was made in its place; it is kept as a record."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def evicted(pods: list[Json]) -> Problem | None:
    """Why a node threw out a replica last, unless one that was made since then is ready."""
    found = [pod for pod in pods if is_over(pod) and pod["status"].get("reason") == "Evicted"]
    if not found:
        return None
    last = max(found, key=_ended_at)
    since = _ended_at(last)
    for pod in pods:
        conditions = {one["type"]: one["status"] for one in (pod.get("status") or {}).get("conditions") or []}
        if conditions.get("Ready") == "True" and parse_time(pod["metadata"]["creationTimestamp"]) >= since:
            return None
    message = last["status"].get("message", "")
    return Problem("Evicted", f"the node evicted a replica; {_way_to_stay(message)}. It says: {_short(message)}")


def _ended_at(pod: Json) -> float:
    stamps = [one["lastTransitionTime"] for one in pod["status"].get("conditions") or [] if "lastTransitionTime" in one]
    return max(parse_time(stamp) for stamp in [*stamps, pod["metadata"]["creationTimestamp"]])


def _way_to_stay(message: str) -> str:
    if volume := re.search(r'EmptyDir volume "([^"]+)"', message):
        field = {"cache": "model.cache.sizeLimit", "shm": "shm.size"}.get(volume[1], "the limit of that volume")
        return f"raise {field}"
    if "ephemeral" in message:
        return "keep models in a claim (model.cache.mode pvc), or request ephemeral-storage in resources.requests"
    if "memory" in message:
        return "raise resources.requests.memory to what it uses"
    return "see what the node lacks by `kubectl describe node`"


CLAIM_PATIENCE = 15.0  # seconds that a volume may take before its absence is called a problem


def claim_pending(claim: Json | None, pods: list[Json], now: float) -> tuple[Problem | None, float | None]:
    """What is wrong when a pod waits for the cache's volume alone, or else after how many seconds to look again.

    The scheduler is silent then: it has chosen a node, and waits for whoever makes volumes.
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
    if max(ages) < CLAIM_PATIENCE:
        return None, CLAIM_PATIENCE - max(ages)
    name = claim["metadata"]["name"]
    text = (
        f"the PersistentVolumeClaim {name} has got no volume for {CLAIM_PATIENCE:.0f} s: `kubectl describe pvc {name}` "
        "says what its provisioner has against it; check cache.pvc.storageClassName and size"
    )
    return Problem("PVCPending", text), None


def _unschedulable(condition: Json, gpu_resource: str | None) -> Problem | None:
    message = condition.get("message", "")
    if condition.get("reason") not in ("Unschedulable", "SchedulerError"):
        return None
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
            f"no node has enough left for a replica; lower resources.requests or add a node. Scheduler: "
            f"{_short(message)}",
        )
    return Problem("Unschedulable", f"no node may take a replica; see spec.scheduling. Scheduler: {_short(message)}")


_IMAGE = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
)


def pulling(events: Sequence[Json]) -> str | None:
    """What is to be said while an image of a pod that hangs is being pulled; None: that is not what it waits for."""
    last = _last_event(events)
    if last is None or last.get("reason") != "Pulling":
        return None
    since = last.get("firstTimestamp") or last.get("eventTime") or ""
    return f"{_short(last.get('message', ''))} since {since}; a large image takes minutes"


def _last_event(events: Sequence[Json]) -> Json | None:
    """The one that tells what a pod waits for now. Of several in one second a warning counts."""
    told = [one for one in events if one.get("reason") != "Scheduled"]
    return max(told, key=lambda one: (_event_time(one), one.get("type") == "Warning"), default=None)


def _event_time(event: Json) -> float:
    series = event.get("series") or {}
    stamps = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return max((int(parse_time(stamp)) for stamp in stamps if stamp), default=0)


def _of_event(event: Json) -> Problem:
    reason, message = event.get("reason", ""), event.get("message", "")
    for kind, label in (("secret", "Secret"), ("configmap", "ConfigMap")):
        if match := re.search(rf'{kind} "([^"]+)" not found', message, re.IGNORECASE):
            return _not_found(label, f"there is no {label} {match[1].rpartition('/')[2]}")
    if match := re.search(r'persistentvolumeclaim "([^"]+)" not found', message):
        return Problem("PVCNotFound", f"there is no PersistentVolumeClaim {match[1]} in this namespace; create it")
    if "Multi-Attach error" in message:
        return Problem(
            "VolumeInUse",
            "a volume is attached to another node, and its access mode allows one at a time; wait until the pod there "
            f"is gone, or use a claim that is ReadWriteMany. {_short(message)}",
        )
    if reason in ("FailedMount", "FailedAttachVolume", "FailedMapVolume"):
        return Problem(
            "VolumeNotMounted",
            f"a volume of the pod cannot be attached or mounted; see its claim and driver. {_short(message)}",
        )
    if reason == "FailedCreatePodSandBox":
        return Problem(
            "SandboxNotCreated",
            f"the node cannot make the pod's network or sandbox; see the node and its CNI plugin. {_short(message)}",
        )
    return Problem("PodNotStarted", f"the pod hangs before its containers start. {reason}: {_short(message)}")


def _not_found(label: str, what: str) -> Problem:
    return Problem(f"{label}NotFound", f"{what} in this namespace; create it, and the pods start by themselves")


def _of_container(status: Json, pod: Json) -> Problem | None:
    name = status["name"]
    waiting = (status.get("state") or {}).get("waiting") or {}
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _IMAGE:
        return Problem(
            "ImagePullBackOff",
            f"image {status.get('image', '')} cannot be pulled; check engine.image and engine.imagePullSecrets. "
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
    terminated = (status.get("state") or {}).get("terminated") or (status.get("lastState") or {}).get("terminated")
    if status.get("ready") or not terminated or (name == FETCH and terminated.get("exitCode") == 0):
        return None
    if terminated.get("reason") == "OOMKilled":
        return _out_of_memory(name, pod)
    if name == FETCH:
        return _of_download(terminated)
    if (
        name == ENGINE
        and reason != "CrashLoopBackOff"
        and status.get("restartCount", 0) < 2
        and terminated.get("exitCode") in (0, 143)
    ):
        return None  # ended on request, once
    restarts = _restarts(status.get("restartCount", 0))
    return Problem(
        "CrashLoop",
        f"container {name} ended with exit code {terminated.get('exitCode')}{restarts}; `kubectl logs --previous` "
        f"tells more. Its last words: {_short(_last_words(terminated))}",
    )


def _restarts(count: int) -> str:
    return ("", " and was restarted once")[count] if count < 2 else f" and was restarted {count} times"


def _out_of_memory(name: str, pod: Json) -> Problem:
    """Whose limit it was: the spec's, one that the namespace's LimitRange set, or none but the node's memory."""
    what = "the download" if name == FETCH else "the engine"
    spec = pod.get("spec") or {}
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    found = next((one for one in containers if one["name"] == name), None)
    limit = (((found or {}).get("resources") or {}).get("limits") or {}).get("memory")
    # "LimitRanger plugin set: cpu, memory request for container engine; memory limit for init container fetch"
    defaulted = (pod["metadata"].get("annotations") or {}).get("kubernetes.io/limit-ranger", "").partition(": ")[2]
    clause = rf"(.*, )?memory(, .*)? limit for (init )?container {re.escape(name)}"
    if any(re.fullmatch(clause, one) for one in defaulted.split("; ")):
        text = (
            f"{what} used more than {limit} of memory, the default that the namespace's LimitRange sets where "
            "resources.limits.memory is left out; set that"
        )
    elif found is not None and limit is None:
        text = (
            f"{what} was killed because its node had no memory left (it has no limit of its own); set "
            "resources.requests.memory to what it uses"
        )
    else:
        text = (
            f"{what} used more memory than resources.limits.memory ({limit}) allows; raise it, or lower "
            "engine.maxModelLen or maxNumSeqs"
        )
    return Problem("OOMKilled", text)


# As `octavo fetch` says it, of models that no patience brings: there is none, or none of a form that is served.
_WRONG_NAME = (
    r"there is no model|no such model|\bis no model\b|\bnot a model\b|has no (revision|file|safetensors)|"
    r"(several files match|no file matches)|holds (several|its weights)|\bis not understood\b"
)


def _of_download(terminated: Json) -> Problem:
    said = _last_words(terminated)
    text = said.lower()
    if re.search(r"\bgated\b", text):
        reason, way_out = (
            "GatedModel",
            "ask for access on the model's page, and give a token of that account by model.credentialsSecretRef",
        )
    elif re.search(_WRONG_NAME, text):  # first: to a name that it does not know a hub answers 401
        reason, way_out = (
            "ModelNotFound",
            "check model.uri and model.revision; a private model needs model.credentialsSecretRef",
        )
    elif re.search(r"\b401\b|unauthori[sz]ed|invalid token|\b403\b|forbidden", text):
        reason, way_out = "Unauthorized", "the hub refuses the token: check the Secret of model.credentialsSecretRef"
    elif re.search(r"\b404\b|does not exist|not found", text):
        reason, way_out = "ModelNotFound", "check model.uri and model.revision"
    elif re.search(r"no space left|\bneeds .* more in ", text):
        reason, way_out = "CacheFull", "raise model.cache.pvc.size or model.cache.sizeLimit"
    else:
        reason, way_out = "DownloadFailed", "it is tried again; check the way to the source (proxy, DNS, NetworkPolicy)"
    return Problem(reason, f"the model cannot be fetched; {way_out}. {_short(said)}")


def _last_words(terminated: Json) -> str:
    lines = [line.strip() for line in (terminated.get("message") or "").splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {terminated.get('exitCode')}"


def _short(text: str, limit: int = 400) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
