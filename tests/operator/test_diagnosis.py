"""What is wrong with pods: the cause that is named is the one that is true now."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.hub_server import FILES, Hub, Repo
from support.llmd import parsed
from support.worlds import status_of

from octavo.errors import ModelError
from octavo.fetch.sources import resolve_model
from octavo_operator.api import LLMDeployment
from octavo_operator.config import OperatorConfig
from octavo_operator.deployment.rollout import make_room
from octavo_operator.observed.diagnosis import diagnose
from octavo_operator.observed.hanging import waiting_since
from octavo_operator.observed.pod_events import PodEvents
from octavo_operator.render import expected_template

Json = dict[str, Any]


def evicted(message: str, ended: str = "2026-01-01T01:00:00Z") -> Json:
    """As the kubelet leaves it: the record of a pod, with containers of which nobody knows how they ended."""
    lost = {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": "The container could not be located"}
    return {
        "metadata": {"name": "gone", "creationTimestamp": "2026-01-01T00:00:00Z", "labels": {}},
        "status": {
            "phase": "Failed",
            "reason": "Evicted",
            "message": message,
            "conditions": [{"type": "Ready", "status": "False", "reason": "PodFailed", "lastTransitionTime": ended}],
            "containerStatuses": [
                {"name": "engine", "ready": False, "restartCount": 0, "state": {"terminated": lost}},
            ],
        },
    }


def running(ready: bool, created: str = "2026-01-01T01:00:00Z") -> Json:
    return {
        "metadata": {"name": "new", "creationTimestamp": created, "labels": {}},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


def told(pods: list[Json], available: int, replicas: int = 1) -> dict[str, Json]:
    counts = {"observedGeneration": 1, "replicas": replicas, "updatedReplicas": replicas}
    live = {
        "metadata": {"generation": 1},
        "spec": {"replicas": replicas},
        "status": {**counts, "availableReplicas": available},
    }
    status = status_of(parsed(replicas=replicas), live, pods)
    return {condition["type"]: condition for condition in status["conditions"]}


LOW = "The node was low on resource: ephemeral-storage."
FULL = 'Usage of EmptyDir volume "cache" exceeds the limit "1Gi". '


def test_a_pod_that_was_evicted_is_forgotten_once_another_serves() -> None:
    found = told([evicted(LOW), running(True)], available=1)
    assert (found["Degraded"]["status"], found["Ready"]["status"]) == ("False", "True")


@pytest.mark.parametrize(
    ("message", "way_out"),
    [(FULL, "model.cache.sizeLimit"), (LOW, "model.cache.mode pvc"), ("low on resource: memory", "requests.memory")],
)
def test_until_then_it_is_why_a_replica_is_missing(message: str, way_out: str) -> None:
    found = told([evicted(message), running(False)], available=0)
    assert found["Degraded"]["reason"] == found["Ready"]["reason"] == found["Available"]["reason"] == "Evicted"
    assert message.strip() in found["Degraded"]["message"]
    assert way_out in found["Degraded"]["message"]


def test_a_replica_that_is_added_later_is_not_missing_for_an_eviction_that_is_over() -> None:
    found = told([evicted(LOW), running(True), running(False, "2026-01-02T00:00:00Z")], available=1, replicas=2)
    assert found["Degraded"]["status"] == "False"


def test_older_pods_do_not_replace_an_evicted_one() -> None:
    others = running(True, "2026-01-01T00:00:00Z")
    assert told([evicted(LOW), others, running(False)], available=1, replicas=2)["Degraded"]["reason"] == "Evicted"


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_a_pod_that_has_ended_for_good_keeps_nothing_from_serving(phase: str) -> None:
    pod = evicted(LOW)
    assert diagnose({**pod, "status": {**pod["status"], "phase": "Running"}}) is not None
    assert diagnose({**pod, "status": {**pod["status"], "phase": phase, "reason": "Terminated"}}) is None


def test_the_record_of_an_old_pod_holds_no_gpu() -> None:
    full = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    waiting = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": full,
        "lastTransitionTime": "2026-01-01T02:00:00Z",
    }
    new = running(False, "2026-01-01T02:00:00Z")
    new["metadata"]["labels"] = {"pod-template-hash": "new"}
    new["status"]["conditions"].append(waiting)
    live = {
        "metadata": {"generation": 1, "annotations": {"deployment.kubernetes.io/revision": "2"}},
        "spec": {"replicas": 1},
        "status": {"observedGeneration": 1, "updatedReplicas": 1},
    }
    assert make_room(parsed(), live, [evicted(LOW), new], 2e9) == (None, None)


# The cache.


def fetching(deployment: LLMDeployment, **state: Any) -> Json:
    """A pod of that spec whose first container has come so far."""
    template = expected_template(deployment, OperatorConfig())
    fetch = {"name": "fetch", "ready": False, "restartCount": 0, "state": state}
    return {**template, "metadata": {"name": "p", "labels": {}}, "status": {"initContainerStatuses": [fetch]}}


def cached(deployment: LLMDeployment, *pods: Json) -> tuple[str, str]:
    template = expected_template(deployment, OperatorConfig())
    status = status_of(deployment, None, list(pods), template=template)
    deployment.status.update(status)
    return next((one["status"], one["reason"]) for one in status["conditions"] if one["type"] == "ModelCached")


DONE = {"terminated": {"exitCode": 0}}
CLAIM = {"cache": {"mode": "pvc", "pvc": {"size": "1Gi"}}}


def of(uri: str, **model: Any) -> LLMDeployment:
    return parsed(model={"uri": uri, **model})


@pytest.mark.parametrize("other", [of("hf://a/c"), of("hf://a/b", revision="v2"), of("hf://a/b-2")])
def test_fetched_models_of_the_previous_spec_do_not_count_as_cached(other: LLMDeployment) -> None:
    old = of("hf://a/b")
    assert cached(old, fetching(old, **DONE)) == ("True", "Fetched")
    assert cached(other, fetching(old, **DONE)) == ("Unknown", "NotFetchedYet")
    assert cached(other, fetching(old, **DONE), fetching(other, running={})) == ("False", "Fetching")
    assert cached(other, fetching(old, **DONE), fetching(other, **DONE)) == ("True", "Fetched")


@pytest.mark.parametrize(("uri", "expected"), [("hf://a/b-2", "True"), ("hf://a/b", "Unknown")])
def test_a_claim_keeps_what_it_has_and_no_model_whose_name_begins_like_it(uri: str, expected: str) -> None:
    longer, now = of("hf://a/b-2", **CLAIM), of(uri, **CLAIM)
    cached(longer, fetching(longer, **DONE))
    now.status.update(longer.status)
    assert cached(now)[0] == expected


# Downloads, by what the engine says of them.


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in [n for n in os.environ if n.startswith(("HF_", "HUGGING", "TRANSFORMERS_")) or "proxy" in n.lower()]:
        monkeypatch.delenv(name)
    with Hub(
        {
            "org/name": Repo(FILES),
            "org/private": Repo(FILES, token="right"),
            "org/gated": Repo(FILES, gated=True),
            "org/pickles": Repo({"config.json": b"{}", "model.bin": b"never"}),
            "org/quants": Repo({"a-Q4_0.gguf": b"never", "a-Q5_0.gguf": b"never"}),
        }
    ) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "octavo"))
        yield hub


def ended(said: str) -> Json:
    """A pod whose model was not fetched, with these last words."""
    state = {"terminated": {"exitCode": 1, "message": f"fetching\noctavo: error: {said}\n"}}
    fetch = {"name": "fetch", "ready": False, "restartCount": 2, "lastState": state}
    fetch["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
    return {"metadata": {"name": "p"}, "status": {"phase": "Pending", "initContainerStatuses": [fetch]}}


@pytest.mark.parametrize(
    ("uri", "token", "revision", "reason"),
    [
        ("hf://org/none", None, None, "ModelNotFound"),  # HTTP 401: the hub does not say whether it is private
        ("hf://org/none", "right", None, "ModelNotFound"),
        ("hf://org/name", None, "v9", "ModelNotFound"),
        ("hf://org/name/x.gguf", None, None, "ModelNotFound"),
        ("hf://org/quants", None, None, "ModelNotFound"),
        ("hf://org/quants:Q2_K", None, None, "ModelNotFound"),
        ("hf://org/pickles", None, None, "ModelNotFound"),
        ("smollm2-135m-instrukt", None, None, "ModelNotFound"),
        ("hf://org/private", None, None, "ModelNotFound"),
        ("hf://org/private", "wrong", None, "Unauthorized"),
        ("hf://org/gated", None, None, "GatedModel"),
    ],
)
def test_the_engine_s_messages_on_downloads_are_understood(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, uri: str, token: str | None, revision: str | None, reason: str
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ModelError) as raised:
        resolve_model(uri, revision=revision, progress=False)
    problem = diagnose(ended(str(raised.value)))
    assert problem is not None
    assert problem.reason == reason, problem.message
    assert reason != "ModelNotFound" or "model.credentialsSecretRef" in problem.message


def test_a_model_that_does_not_fit_needs_a_larger_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ModelError) as raised:
        resolve_model("hf://org/name", progress=False)
    problem = diagnose(ended(str(raised.value)))
    assert problem is not None
    assert problem.reason == "CacheFull", problem.message


def test_a_name_that_sounds_like_a_fault_is_none() -> None:
    problem = diagnose(ended("cannot reach https://hub to fetch org/investigated: timed out; check the network"))
    assert problem is not None
    assert problem.reason == "DownloadFailed"


# Pods that hang before their containers start.


def waiting(started: str = "2026-01-01T00:00:00Z", **more: Any) -> Json:
    """A pod that has a node, and no container yet."""
    creating = {"name": "engine", "state": {"waiting": {"reason": "ContainerCreating"}}, "restartCount": 0}
    status = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": started}],
        "containerStatuses": [creating],
    }
    return {"metadata": {"name": "p", "uid": "p", "creationTimestamp": started}, "status": {**status, **more}}


def event(reason: str, message: str, at: str = "2026-01-01T00:00:05Z", kind: str = "Warning") -> Json:
    return {"type": kind, "reason": reason, "message": message, "lastTimestamp": at, "firstTimestamp": at}


SCHEDULED = event("Scheduled", "Successfully assigned", "2026-01-01T00:00:59Z", "Normal")
PULLING = 'Pulling image "example.com/engine:1"'


@pytest.mark.parametrize(
    ("events", "reason", "words"),
    [
        (
            [event("FailedMount", 'MountVolume.SetUp failed for volume "v" : secret "n/keys" not found')],
            "SecretNotFound",
            "there is no Secret keys",
        ),
        (
            [event("FailedMount", 'MountVolume.SetUp failed for volume "v" : configmap "template" not found')],
            "ConfigMapNotFound",
            "there is no ConfigMap template",
        ),
        (
            [
                event(
                    "FailedAttachVolume", 'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) other'
                )
            ],
            "VolumeInUse",
            "ReadWriteMany",
        ),
        ([event("FailedAttachVolume", "AttachVolume.Attach failed: timed out")], "VolumeNotMounted", "timed out"),
        (
            [event("FailedCreatePodSandBox", "plugin type=bridge failed (add): no IP addresses")],
            "SandboxNotCreated",
            "no IP addresses",
        ),
        ([event("NetworkNotReady", "network is not ready: cni config uninitialized")], "PodNotStarted", "cni config"),
        ([SCHEDULED], None, ""),
        ([], None, ""),
        ([event("FailedMount", "timed out"), event("Pulling", PULLING, "2026-01-01T00:00:09Z", "Normal")], None, ""),
        (
            [event("Pulling", PULLING, "2026-01-01T00:00:01Z", "Normal"), event("FailedMount", "at last")],
            "VolumeNotMounted",
            "at last",
        ),
    ],
)
def test_events_tell_why_a_pod_hangs(events: list[Json], reason: str | None, words: str) -> None:
    found = diagnose(waiting(), None, [SCHEDULED, *events])
    assert (found and found.reason) == reason
    assert found is None or words in found.message


def test_a_long_pull_is_said_and_is_no_problem() -> None:
    pod, pulled = waiting(), event("Pulling", PULLING, kind="Normal")
    live = {"metadata": {"generation": 1}, "spec": {"replicas": 1}, "status": {"observedGeneration": 1, "replicas": 1}}
    status = status_of(parsed(), live, [pod], pod_events={"p": [pulled]})
    found = {one["type"]: one for one in status["conditions"]}
    assert found["Degraded"]["status"] == "False"
    for kind in ("Ready", "Available"):
        assert found[kind]["reason"] == "PullingImage"
        assert "example.com/engine:1" in found[kind]["message"]


def at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


DONE = {"terminated": {"exitCode": 0, "finishedAt": at(500)}}


@pytest.mark.parametrize(
    ("more", "since"),
    [
        ({}, 100.0),
        ({"containerStatuses": []}, 100.0),
        ({"phase": "Running"}, None),
        ({"conditions": [{"type": "PodScheduled", "status": "False"}]}, None),
        ({"initContainerStatuses": [{"name": "fetch", "state": {"running": {}}}]}, None),
        ({"initContainerStatuses": [{"name": "fetch", "state": DONE}]}, 500.0),
        ({"initContainerStatuses": [{"name": "fetch", "state": {"waiting": {"reason": "PodInitializing"}}}]}, 100.0),
        ({"containerStatuses": [{"name": "engine", "state": {"waiting": {"reason": "ErrImagePull"}}}]}, None),
    ],
)
def test_hanging_pods_are_found(more: Json, since: float | None) -> None:
    assert waiting_since(waiting(at(100), **more)) == since


def test_events_are_read_of_pods_that_hang_alone_and_seldom() -> None:
    asked: list[str] = []

    class Answers:
        async def call(self, method: str, path: str, params: Json) -> Json:
            asked.append(params["fieldSelector"])
            return {"items": [event("FailedMount", "x")]}

    async def run() -> None:
        events = PodEvents(Answers())  # type: ignore[arg-type]
        pods = [waiting(at(100)), running(ready=True)]
        assert await events.read(("n", "toy"), pods, 105.0) == ({}, pytest.approx(15.1)), "it may still start"
        for now in range(120, 150):
            found, again = await events.read(("n", "toy"), pods, float(now))
            assert list(found) == ["p"] and again is not None and again <= 15.2
        assert await events.read(("n", "toy"), [running(ready=True)], 150.0) == ({}, None)

    asyncio.run(run())
    assert asked == ["involvedObject.uid=p"] * 2


# Memory.


@pytest.mark.parametrize(
    ("limit", "said", "words"),
    [
        ("1Gi", None, "exceeded resources.limits.memory (1Gi)"),
        ("1Gi", "cpu, memory request for container engine; cpu, memory limit for container engine", "LimitRange"),
        ("1Gi", "memory limit for container engine", "LimitRange"),
        ("1Gi", "memory request for container engine; cpu limit for container engine", "resources.limits.memory (1Gi)"),
        ("1Gi", "memory limit for init container fetch", "resources.limits.memory (1Gi)"),
        (None, None, "its node ran out of memory"),
    ],
)
def test_the_origin_of_the_memory_limit_is_reported(limit: str | None, said: str | None, words: str) -> None:
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    pod = running(ready=False)
    pod["spec"] = {"containers": [{"name": "engine", "resources": {"limits": {"memory": limit} if limit else {}}}]}
    pod["status"]["containerStatuses"] = [{"name": "engine", "ready": False, "restartCount": 1, "lastState": ended}]
    if said:
        pod["metadata"]["annotations"] = {"kubernetes.io/limit-ranger": f"LimitRanger plugin set: {said}"}
    problem = diagnose(pod)
    assert problem is not None and problem.reason == "OOMKilled"
    assert words in problem.message


@pytest.mark.parametrize(
    ("count", "words"), [(0, "exit code 1;"), (1, "was restarted once;"), (7, "was restarted 7 times;")]
)
def test_restarts_are_counted_in_words_that_people_use(count: int, words: str) -> None:
    pod = running(ready=False)
    state = {"terminated": {"exitCode": 1, "reason": "Error"}}
    pod["status"]["containerStatuses"] = [{"name": "engine", "ready": False, "restartCount": count, "state": state}]
    problem = diagnose(pod)
    assert problem is not None and words in problem.message
