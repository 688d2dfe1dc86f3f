"""`model.cache.prefetch`: a change of the model costs no serving pod."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from support.llmd import manifest, parsed
from support.llmd_strategies import specs
from support.worlds import world

from octavo_operator import api
from octavo_operator.config import OperatorConfig
from octavo_operator.deployment.events import events
from octavo_operator.deployment.reconcile import reconcile
from octavo_operator.kube.resources import IMAGE_VOLUMES
from octavo_operator.kube.store import Observed
from octavo_operator.observed.children import pods_of
from octavo_operator.render import expected_template
from octavo_operator.render.names import PREFETCH
from octavo_operator.render.prefetch import expected_prefetch
from octavo_operator.render.restricted import violations
from octavo_operator.writes.plan import Apply, Delete, pod_spec_digest

Json = dict[str, Any]
NOW = 1.9e9
AT_NOW, LONG_AGO = "2030-03-17T17:46:40Z", "2026-01-01T00:00:00Z"
CONFIG = OperatorConfig(engine_image="example.com/engine:1")
GOLDEN = Path(__file__).parent / "golden" / "prefetch-job.yaml"
MANY = {"size": "40Gi", "accessModes": ["ReadWriteMany"]}


def model(uri: str, prefetch: bool = True, **more: Any) -> Json:
    return {"model": {"uri": uri, "cache": {"mode": "pvc", "pvc": MANY, "prefetch": prefetch}, **more}}


class Cluster:
    """What the API server has of one LLMDeployment whose pods serve."""

    def __init__(self, **spec: Any) -> None:
        self.objects: dict[tuple[str, str], Json] = {}
        self.pods: list[Json] = []
        self.status: Json = {}
        self.spec, self.now, self.generation = spec, NOW, 0

    def change(self, **spec: Any) -> set[str]:
        self.spec = spec
        return self.step()

    def step(self) -> set[str]:
        """One reconciliation: the kinds that it wrote ("-": deleted)."""
        self.generation += 1
        body = manifest(**self.spec)
        body["metadata"] |= {"uid": "u", "generation": self.generation}
        deployment = api.LLMDeployment.from_json({**body, "status": self.status})
        seen = [self._observed(one) for one in self.objects.values()]
        seen += [Observed.of("Pod", "v1", pod) for pod in self.pods]
        outcome = reconcile(deployment, world(seen, now=self.now, apis={IMAGE_VOLUMES}), CONFIG)
        wrote = set()
        for action in outcome.plan.actions:
            if isinstance(action, Apply):
                one = copy.deepcopy(action.manifest)
                one["metadata"] |= {"creationTimestamp": AT_NOW}
                self.objects[one["kind"], one["metadata"]["name"]] = one
                wrote.add(one["kind"])
            elif isinstance(action, Delete):
                del self.objects[action.target.kind, action.target.name]
                wrote.add(f"-{action.target.kind}")
        assert outcome.status is not None
        self.due = outcome.requeue_after
        self.events = [one.reason for one in events(self.status, outcome.status)]
        self.status = outcome.status
        return wrote

    def _observed(self, body: Json) -> Observed:
        status = body.get("status")
        if body["kind"] == "Deployment":
            wanted = body["spec"]["replicas"]
            counts = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), wanted)
            status = {"observedGeneration": 1, **counts}
        ref = f"{body['kind']}-{body['metadata']['name']}"
        meta = {**body["metadata"], "uid": ref, "generation": 1, "resourceVersion": "1"}
        return Observed.of(body["kind"], body["apiVersion"], {**body, "status": status or {}, "metadata": meta})

    @property
    def jobs(self) -> list[Json]:
        return [one for (kind, _), one in self.objects.items() if kind == "Job"]

    @property
    def fetched(self) -> str:
        """What new pods would fetch."""
        return str(self.objects["Deployment", "toy"]["spec"]["template"]["spec"]["initContainers"][0]["args"][0])

    def end(self, kind: str, at: str = AT_NOW) -> None:
        """The Job ends: Complete or Failed."""
        ended = {"type": kind, "status": "True", "reason": "Why", "message": "because", "lastTransitionTime": at}
        self.jobs[0]["status"] = {"conditions": [ended]}

    def condition(self, kind: str) -> tuple[str, str, str]:
        one = next(one for one in self.status["conditions"] if one["type"] == kind)
        return one["status"], one["reason"], one["message"]


def serving(**spec: Any) -> Cluster:
    cluster = Cluster(**spec)
    cluster.step()
    assert not cluster.step()
    return cluster


def job_pod(job: str, **container: Any) -> Json:
    labels = {"octavo.dev/llmdeployment": "toy", "app.kubernetes.io/component": PREFETCH}
    meta = {
        "name": "j",
        "namespace": "default",
        "uid": "j",
        "resourceVersion": "1",
        "labels": labels,
        "creationTimestamp": LONG_AGO,
        "ownerReferences": [{"kind": "Job", "name": job}],
    }
    return {"metadata": meta, "spec": {}, "status": {"containerStatuses": [{"name": "fetch", **container}]}}


def test_old_pods_stay_until_the_new_model_is_in_the_cache() -> None:
    cluster = serving(**model("org/old"))
    before = copy.deepcopy(cluster.objects["Deployment", "toy"]["spec"]["template"])
    assert cluster.change(**model("org/new")) == {"Job"}
    assert cluster.events == ["Prefetching"]
    assert cluster.objects["Deployment", "toy"]["spec"]["template"] == before
    assert cluster.condition("Progressing")[:2] == ("True", "Prefetching")
    assert cluster.condition("ModelCached")[:2] == ("False", "Fetching")
    assert cluster.condition("Available")[0] == "True" and cluster.condition("Degraded")[0] == "False"
    assert cluster.condition("Ready")[:2] == ("False", "Prefetching")
    assert cluster.jobs[0]["spec"]["template"]["spec"]["containers"][0]["args"][0] == "org/new"
    assert not cluster.step(), "it waits"
    cluster.end("Complete")
    assert cluster.step() == {"Deployment"} and cluster.fetched == "org/new"
    assert cluster.condition("ModelCached")[:2] == ("True", "Fetched")
    assert cluster.step() == {"-Job"}
    assert not cluster.step() and not cluster.jobs


def test_other_changes_do_not_wait() -> None:
    cluster = serving(**model("org/old"))
    assert cluster.change(**model("org/old"), engine={"maxNumSeqs": 7}) == {"Deployment"} and not cluster.jobs
    assert cluster.change(**model("org/old", prefetch=False), engine={"maxNumSeqs": 7}) == set(), "no pod is replaced"


def test_replicas_follow_while_it_is_fetched() -> None:
    cluster = serving(**model("org/old"))
    cluster.change(**model("org/new"))
    assert cluster.change(**model("org/new"), replicas=3) == {"Deployment"}
    live = cluster.objects["Deployment", "toy"]
    assert live["spec"]["replicas"] == 3 and cluster.fetched == "org/old"
    cluster.end("Complete")
    assert "Deployment" in cluster.step() and cluster.fetched == "org/new"


def test_a_third_model_replaces_the_fetch_of_the_second_and_the_first_ends_it() -> None:
    cluster = serving(**model("org/old"))
    cluster.change(**model("org/new"))
    second = cluster.jobs[0]["metadata"]["name"]
    assert cluster.change(**model("org/third")) == {"Job", "-Job"}
    assert [one["metadata"]["name"] for one in cluster.jobs] != [second] and cluster.fetched == "org/old"
    assert cluster.change(**model("org/old")) == {"-Job"}
    assert cluster.condition("Progressing")[:2] == ("False", "Complete")


@pytest.mark.parametrize(
    "spec",
    [model("org/new", prefetch=False), {**model("org/new"), "suspend": True}, {"model": {"uri": "file:///model"}}],
    ids=["switched off", "suspended", "not fetched"],
)
def test_nothing_is_fetched_in_advance_where_nobody_asks_for_it(spec: Json) -> None:
    cluster = serving(**model("org/old"))
    assert "Deployment" in cluster.change(**spec) and not cluster.jobs


def test_a_template_that_others_change_does_not_keep_the_job() -> None:
    cluster = serving(**model("org/old"))
    cluster.change(**model("org/new"))
    cluster.end("Complete")
    cluster.step()
    fetch = cluster.objects["Deployment", "toy"]["spec"]["template"]["spec"]["initContainers"][0]
    fetch["args"] = ["--proxy", *fetch["args"]]
    assert "-Job" in cluster.step()


def test_the_first_model_is_fetched_by_its_pod() -> None:
    cluster = Cluster(**model("org/first"))
    assert "Job" not in cluster.step()


def test_a_failed_fetch_is_told_in_its_own_words_and_tried_again() -> None:
    cluster = serving(**model("org/old"))
    cluster.change(**model("org/new"))
    job = cluster.jobs[0]["metadata"]["name"]
    words = "octavo: error: there is no model org/new"
    failed = {"exitCode": 1, "message": words}
    for state in ({"waiting": {"reason": "CrashLoopBackOff"}}, {"running": {}}):
        cluster.pods = [job_pod(job, state=state, lastState={"terminated": failed}, ready="running" in state)]
        assert not cluster.step()
        for kind in ("Degraded", "ModelCached"):
            assert cluster.condition(kind)[1] == "ModelNotFound" and words in cluster.condition(kind)[2]
        assert cluster.condition("Available")[0] == "True" and cluster.condition("Progressing")[1] == "Prefetching"
        assert cluster.fetched == "org/old"
    cluster.pods = []
    cluster.end("Failed")
    assert not cluster.step() and cluster.condition("Degraded")[1] == "DownloadFailed"
    assert "Why: because" in cluster.condition("Degraded")[2] and cluster.due == 60.0
    cluster.now += 61
    assert cluster.step() == {"-Job"}
    assert cluster.step() == {"Job"}, "another one takes its place"


def test_a_job_without_a_pod_is_told() -> None:
    cluster = serving(**model("org/old"))
    cluster.change(**model("org/new"))
    cluster.step()
    assert cluster.condition("Degraded")[0] == "False" and cluster.due == 30.0
    cluster.now += 31
    cluster.step()
    assert cluster.condition("Degraded")[1] == "PodsNotCreated"


def test_its_pod_is_no_engine() -> None:
    cluster = serving(**model("org/old"))
    cluster.change(**model("org/new"))
    job = cluster.jobs[0]
    labels = job["spec"]["template"]["metadata"]["labels"]
    selector = cluster.objects["Deployment", "toy"]["spec"]["selector"]["matchLabels"]
    assert not selector.items() <= labels.items()
    service = cluster.objects["Service", "toy"]["spec"]["selector"]
    assert not service.items() <= labels.items()
    pod = Observed.of("Pod", "v1", job_pod(job["metadata"]["name"]))
    assert pods_of([pod]) == []


def test_golden() -> None:
    """The Job does what the container `fetch` does: credentials, patches, names of images."""
    deployment = parsed(
        **model("hf://org/name", credentialsSecretRef={"name": "hub"}),
        engine={"env": [{"name": "HTTPS_PROXY", "value": "http://proxy"}], "imagePullSecrets": ["registry"]},
        resources={"requests": {"cpu": 64, "memory": "512Gi"}},
        accelerator={"count": 1},
        scheduling={"nodeSelector": {"zone": "a"}},
        podLabels={"team": "a"},
    )
    made = expected_prefetch(deployment, expected_template(deployment, CONFIG))
    text = yaml.safe_dump(made, sort_keys=False, width=120)
    if not GOLDEN.exists():
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


@given(specs)
def test_its_pods_are_restricted_whatever_the_spec(spec: Json) -> None:
    deployment = parsed(**spec)
    template = expected_template(deployment, CONFIG)
    if not deployment.spec.model.is_fetched:
        return
    job = expected_prefetch(deployment, template)
    pod = job["spec"]["template"]
    assert not list(violations(pod, "toy"))
    mounted = {one["name"] for container in pod["spec"]["containers"] for one in container["volumeMounts"]}
    assert mounted == {one["name"] for one in pod["spec"]["volumes"]}
    assert len(job["metadata"]["name"]) <= 63 and job["metadata"]["ownerReferences"][0]["controller"]
    assert not any("gpu" in key for key in pod["spec"]["containers"][0]["resources"]["requests"])


def test_long_names_still_differ() -> None:
    names = set()
    for uri in ("org/a", "org/b"):
        deployment = parsed("x" * 63, **model(uri))
        names.add(expected_prefetch(deployment, expected_template(deployment, CONFIG))["metadata"]["name"])
    assert len(names) == 2 and all(len(name) == 63 for name in names)


def test_switching_it_on_is_no_change_of_pods() -> None:
    assert pod_spec_digest(parsed(**model("org/a"))) == pod_spec_digest(parsed(**model("org/a", prefetch=False)))
