"""What is said of an LLMDeployment when the API server does not do as it is asked."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest
from support.llmd import manifest, parsed
from support.worlds import world

from octavo_operator.api import API_VERSION, KIND
from octavo_operator.config import OperatorConfig
from octavo_operator.controller import Controller
from octavo_operator.deployment.reconcile import Outcome, reconcile
from octavo_operator.kube.client import ApiError
from octavo_operator.kube.store import Observed
from octavo_operator.writes.plan import Apply, Delete

Json = dict[str, Any]

CONFIG = OperatorConfig()
KEY = ("default", "toy")
WRONG_TYPE = (
    "failed to create typed patch object (default/toy; apps/v1, Kind=Deployment): "
    '.spec.template.spec.containers[name="engine"].env[name="THREADS"].value: expected string, got 8'
)
WEBHOOK_DOWN = 'Internal error occurred: failed calling webhook "policy": connection refused'
COMPLETE = {
    "observedGeneration": 1,
    "replicas": 1,
    "updatedReplicas": 1,
    "readyReplicas": 1,
    "availableReplicas": 1,
}


class Lease:
    is_held = True
    leading = asyncio.Event()


class Answers:
    """An API server that takes everything but some Deployments, and remembers what was said in the status."""

    def __init__(self, body: Json) -> None:
        self.body, self.error, self.taken, self.said = body, None, [], []  # type: ignore[var-annotated]
        self.events: list[Json] = []
        self.version = 1

    async def get(self, *_: Any) -> None:
        return None

    async def call(self, method: str, path: str, body: Json) -> Json:
        self.events.append(body)
        return body

    async def apply(self, manifest: Json, manager: str, subresource: str | None = None) -> Json:
        self.version += 1
        version = str(self.version)
        if subresource:
            if "resourceVersion" not in manifest["metadata"]:  # else it is the claim that comes first
                self.said.append(manifest["status"])
            self.body = {**self.body, "status": manifest["status"]}
            return {**self.body, "metadata": {**self.body["metadata"], "resourceVersion": version}}
        if self.error and manifest["kind"] == "Deployment":
            raise self.error
        self.taken.append(manifest["kind"])
        return as_live(manifest, version)


def as_live(manifest: Json, version: str = "1") -> Json:
    status = {"status": COMPLETE} if manifest["kind"] == "Deployment" else {}
    return {
        **manifest,
        **status,
        "metadata": {**manifest["metadata"], "uid": manifest["kind"], "generation": 1, "resourceVersion": version},
    }


def changed(serving: bool, **spec: Any) -> tuple[Controller, Answers]:
    """A controller that is about to see a second spec; `serving`: all that the first one asked for is there."""
    body = manifest(**spec)
    body["metadata"] |= {"uid": parsed().uid, "generation": 2, "resourceVersion": "1"}
    cluster = Answers(body)
    controller = Controller(cluster, CONFIG, Lease())  # type: ignore[arg-type]
    if serving:
        for action in reconcile(parsed(), world(), CONFIG).plan.actions:
            assert isinstance(action, Apply)
            one = as_live(action.manifest)
            controller.store.put(Observed.of(one["kind"], one["apiVersion"], one))
    controller.store.put(Observed.of(KIND, API_VERSION, body))
    return controller, cluster


def look_at(controller: Controller, times: int = 1) -> bool:
    async def run() -> bool:
        return [await controller._reconcile(KEY) for _ in range(times)][-1]

    return asyncio.run(run())


def conditions(status: Json) -> dict[str, tuple[str, str]]:
    return {one["type"]: (one["status"], one["reason"]) for one in status["conditions"]}


PATCH = [{"op": "add", "path": "/spec/containers/0/env/-", "value": {"name": "THREADS", "value": 8}}]


@pytest.mark.parametrize("serving", [False, True])
def test_a_permanently_refused_write_is_reported_and_the_rest_is_done(serving: bool) -> None:
    """Server-side apply answers HTTP 500 to a patch that makes a field of a wrong type."""
    controller, cluster = changed(serving, podPatches=PATCH, service={"port": 81})
    cluster.error = ApiError(500, {"message": WRONG_TYPE})
    assert not look_at(controller, times=2)
    found = conditions(cluster.said[-1])
    assert found["Degraded"] == ("True", "ObjectRejected")
    assert found["Ready"] == ("False", "ObjectRejected")
    assert found["Progressing"] == ("False", "ObjectRejected")
    assert "expected string, got 8" in cluster.said[-1]["conditions"][0]["message"]
    assert "Service" in cluster.taken
    assert serving or "PodDisruptionBudget" in cluster.taken, "which comes after the Deployment"


def test_postponed_writes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    controller, cluster = changed(serving=True, replicas=2)
    cluster.error = ApiError(500, {"message": WEBHOOK_DOWN})
    with caplog.at_level(logging.WARNING, "octavo.operator"):
        assert not look_at(controller)
    assert "connection refused" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        ApiError(500, {"message": WEBHOOK_DOWN}),
        ApiError(429, {"message": "too many requests"}),
        TimeoutError(),
    ],
    ids=["webhook", "overload", "timeout"],
)
def test_a_spec_that_cannot_be_applied_for_now_is_not_called_served(error: Exception) -> None:
    controller, cluster = changed(serving=True, engine={"maxNumSeqs": 7})
    cluster.error = error
    assert not look_at(controller)
    found = conditions(cluster.said[-1])
    assert found["Available"][0] == "True"
    assert found["Ready"] == ("False", "Applying")
    assert found["Progressing"] == ("True", "Applying")
    cluster.error = None
    time.sleep(controller._applier.rejected_writes.retry_after(KEY) or 0)
    look_at(controller)
    assert conditions(cluster.said[-1])["Progressing"] == ("False", "Complete")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ApiError(500, {"message": f'{WEBHOOK_DOWN} failed calling webhook "policy"'}), "WebhookUnavailable"),
        (ApiError(429, {"message": "too many requests"}), "TooManyRequests"),
        (ApiError(409, {"message": "conflict"}), "Conflict"),
        (TimeoutError(), "APIServerUnreachable"),
    ],
)
def test_a_lasting_error_is_a_condition_and_an_event_and_ends_with_its_cause(error: Exception, reason: str) -> None:
    controller, cluster = changed(serving=True, engine={"maxNumSeqs": 7})
    now = [0.0]
    controller._applier.rejected_writes._clock = lambda: now[0]
    cluster.error = error
    for now[0] in (0.0, 0.5, 1.5, 3.5):
        assert not look_at(controller)
    assert conditions(cluster.said[-1])["Degraded"] == ("True", reason)
    assert [one["reason"] for one in cluster.events] == [reason]
    now[0] = 200
    cluster.error = None
    look_at(controller)
    assert conditions(cluster.said[-1])["Ready"] == ("True", "Ready")
    assert cluster.events[-2]["reason"] == "Recovered" or cluster.events[-1]["reason"] == "Recovered"


def test_an_older_crd_costs_the_times_of_starts_alone() -> None:
    controller, cluster = changed(serving=True)
    recorded = {"pod": "p", "readyAt": "2026-01-01T00:00:00Z", "ready": 3.0}
    body = {**cluster.body, "status": {"start": recorded}}
    controller.store.put(
        Observed.of(KIND, API_VERSION, {**body, "metadata": body["metadata"] | {"resourceVersion": "2"}})
    )
    accept = cluster.apply

    async def apply(manifest: Json, manager: str, subresource: str | None = None) -> Json:
        if "start" in manifest.get("status", {}) and "conditions" in manifest["status"]:
            text = "failed to create typed patch object (x): .status.start: field not declared in schema"
            raise ApiError(500, {"message": text})
        return await accept(manifest, manager, subresource)

    cluster.apply = apply  # type: ignore[method-assign]
    look_at(controller)
    assert conditions(cluster.said[-1])["Available"][0] == "True"
    assert "start" not in cluster.said[-1] and not controller.pod_starts.are_supported


def test_a_pod_that_hangs_has_the_reason_of_its_events() -> None:
    controller, cluster = changed(serving=True)
    labels = {"octavo.dev/llmdeployment": "toy", "app.kubernetes.io/component": "engine"}
    long_ago = "2026-01-01T00:00:00Z"
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": long_ago}
    meta = {"name": "p", "namespace": "default", "uid": "p", "resourceVersion": "5", "labels": labels}
    pod = {
        "metadata": {**meta, "creationTimestamp": long_ago},
        "spec": {},
        "status": {"phase": "Pending", "conditions": [scheduled]},
    }
    controller.store.put(Observed.of("Pod", "v1", pod))
    message = 'MountVolume.SetUp failed for volume "v" : secret "keys" not found'
    event = {"type": "Warning", "reason": "FailedMount", "message": message, "lastTimestamp": long_ago}
    posted = cluster.call

    async def call(method: str, path: str, body: Any = None, params: Json | None = None) -> Json:
        if method == "GET":
            assert params is not None and "involvedObject.uid=p" in params["fieldSelector"]
            return {"items": [event]}
        return await posted(method, path, body)

    cluster.call = call  # type: ignore[method-assign, assignment]
    look_at(controller)
    assert conditions(cluster.said[-1])["Degraded"] == ("True", "SecretNotFound")


def test_a_patch_that_does_not_fit_is_not_called_served() -> None:
    controller, cluster = changed(serving=True, podPatches=[{"op": "remove", "path": "/spec/containers/7"}])
    look_at(controller)
    found = conditions(cluster.said[-1])
    assert found["Progressing"] == found["Ready"] == ("False", "InvalidPodPatch")


def test_service_and_autoscaler_are_applied_though_the_spec_makes_no_pods() -> None:
    """Or an autoscaler, or a Service that somebody deleted, would wait for whoever corrects a patch."""
    bad = [{"op": "add", "path": "/spec/hostNetwork", "value": True}]
    controller, cluster = changed(serving=True, podPatches=bad, service={"port": 81}, replicas=3)
    before = controller.store.get("Deployment", *KEY).body  # type: ignore[union-attr]
    look_at(controller)
    found = conditions(cluster.said[-1])
    assert found["Degraded"] == ("True", "PrivilegedPod")
    assert found["Ready"][0] == "False" == found["Progressing"][0]
    assert {"Service", "Deployment"} <= set(cluster.taken)
    after = controller.store.get("Deployment", *KEY).body  # type: ignore[union-attr]
    assert after["spec"]["replicas"] == 3
    assert after["spec"]["template"] == before["spec"]["template"]


def test_pods_that_stay_keep_their_claim_though_the_spec_makes_none() -> None:
    claim = {"model": {"uri": "hf://a/b", "cache": {"mode": "pvc", "pvc": {"size": "1Gi"}}}}
    first = reconcile(parsed(**claim), world(), CONFIG)
    children = [Observed.of(one["kind"], one["apiVersion"], one) for one in map(as_live, applied(first))]
    bad = parsed(podPatches=[{"op": "remove", "path": "/spec/containers/7"}])
    assert not [one for one in reconcile(bad, world(children, now=1.0), CONFIG).plan.actions if isinstance(one, Delete)]
    good = reconcile(parsed(), world(children, now=1.0), CONFIG).plan.actions
    assert [one.target.kind for one in good if isinstance(one, Delete)] == ["PersistentVolumeClaim"]


def applied(outcome: Outcome) -> list[Json]:
    return [action.manifest for action in outcome.plan.actions if isinstance(action, Apply)]


def test_a_change_that_is_applied_says_nothing_in_between() -> None:
    """What is said is how it stands after the writes, so nobody hears of a spec that is about to be applied."""
    controller, cluster = changed(serving=True, engine={"maxNumSeqs": 7})
    assert look_at(controller)
    assert [conditions(status)["Progressing"] for status in cluster.said] == [("False", "Complete")]
    assert look_at(controller, times=3)
    assert len(cluster.said) == 1


def test_an_object_that_a_webhook_always_alters_is_served_all_the_same() -> None:
    controller, cluster = changed(serving=True)
    taken = cluster.apply

    async def alter(one: Json, manager: str, subresource: str | None = None) -> Json:
        out = await taken(one, manager, subresource)
        return {**out, "spec": {**out["spec"], "minReadySeconds": 9}} if one["kind"] == "Deployment" else out

    cluster.apply = alter  # type: ignore[method-assign]
    live = controller.store.get("Deployment", *KEY)
    assert live is not None
    body = live.body
    body["spec"]["minReadySeconds"], body["metadata"]["resourceVersion"] = 9, "2"
    controller.store.put(Observed.of("Deployment", "apps/v1", body))
    look_at(controller)
    assert "Deployment" in cluster.taken
    assert conditions(cluster.said[-1])["Ready"] == ("True", "Ready")


def exposed(controller: Controller) -> dict[str, float]:
    pairs = (line.rsplit(" ", 1) for line in controller.metrics.expose().decode().splitlines() if line[0] != "#")
    return {name: float(value) for name, value in pairs}


CONDITION = 'octavo_llmdeployment_condition{llmdeployment="toy",namespace="default",type="%s"}'


def test_alerts_hear_of_a_spec_that_cannot_be_read() -> None:
    controller, _ = changed(serving=True, replicas=1)
    look_at(controller)
    assert exposed(controller)[CONDITION % "Ready"] == 1
    body = controller.store.get(KIND, *KEY).body  # type: ignore[union-attr]
    body["spec"]["replicas"], body["metadata"]["resourceVersion"] = "two", "99"
    controller.store.put(Observed.of(KIND, API_VERSION, body))
    look_at(controller)
    found = exposed(controller)
    assert (found[CONDITION % "Ready"], found[CONDITION % "Degraded"]) == (0, 1)
    assert found['octavo_llmdeployment_replicas{llmdeployment="toy",namespace="default",state="desired"}'] == 1


def test_a_rollout_that_cannot_begin_does_not_last_since_the_one_before() -> None:
    """Or an alert would call it stuck for days at once."""
    controller, cluster = changed(serving=True, podPatches=[{"op": "remove", "path": "/spec/containers/7"}])
    body = controller.store.get(KIND, *KEY).body  # type: ignore[union-attr]
    long_ago = {"message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    before = [
        {"type": "Ready", "status": "True", "reason": "Ready", **long_ago},
        {"type": "Progressing", "status": "False", "reason": "Complete", **long_ago},
    ]
    body["status"], body["metadata"]["resourceVersion"] = {"conditions": before}, "2"
    controller.store.put(Observed.of(KIND, API_VERSION, body))
    look_at(controller)
    assert conditions(cluster.said[-1])["Progressing"] == ("False", "InvalidPodPatch")
    found = exposed(controller)
    assert found['octavo_llmdeployment_rollout_seconds{llmdeployment="toy",namespace="default"}'] < 60
