"""Real models behind one address: clients reach each by its name, models come and go, and no stream is broken."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from clusterrig.fixtures import Cluster, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NAME = "models"
PATIENCE = 600
ROUTABLE_SECONDS = 3.0
Json = dict[str, Any]


def llmd(name: str, model: Json | None = None, replicas: int = 1) -> Json:
    return {
        "apiVersion": "octavo.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": "smollm2-135m-instruct", **(model or {})},
            "replicas": replicas,
            "engine": {"maxModelLen": 512, "maxNumSeqs": 8, "env": [{"name": "OMP_NUM_THREADS", "value": "1"}]},
            "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}},
            "lifecycle": {"preStopSeconds": 5, "drainSeconds": 60},
        },
    }


def llmg(name: str, **spec: Any) -> Json:
    return {"apiVersion": "octavo.dev/v1alpha1", "kind": "LLMGateway", "metadata": {"name": name}, "spec": spec}


@pytest.fixture(scope="module")
def deployed(cluster: Cluster, installed: str) -> Iterator[str]:
    """Two models, one of them with a name and an alias of its own, and a gateway."""
    if not cluster.is_rig:
        pytest.skip("the clients are outside of the cluster, and only the rig's Services are reached from there")
    alias = {"name": "gpt-4o-mini", "model": "one"}
    cluster.apply(
        llmd("one"),
        llmd("two", {"name": "second", "aliases": ["deux"]}),
        llmg(NAME, aliases=[alias]),
        namespace=installed,
    )
    for one in ("one", "two"):
        eventually(lambda one=one: condition(cluster, installed, "llmd", one, "Available") == "Serving", PATIENCE)
    eventually(lambda: condition(cluster, installed, "llmg", NAME) == "Ready", PATIENCE)
    eventually(lambda: all(one["ready"] for one in models(cluster, installed)), 60)
    yield installed
    cluster.kubectl("delete", "llmg,llmd", "--all", "-n", installed, "--timeout=60s", timeout=90)


def condition(cluster: Cluster, namespace: str, kind: str, name: str, which: str = "Ready") -> str:
    """Its reason."""
    found = cluster.get(kind, name, namespace=namespace)["status"]["conditions"]
    return str(next(one for one in found if one["type"] == which)["reason"])


def models(cluster: Cluster, namespace: str) -> list[Json]:
    return list(cluster.get("llmg", NAME, namespace=namespace)["status"]["models"])


def address(cluster: Cluster, namespace: str) -> str:
    return f"http://{cluster.get('service', NAME, namespace=namespace)['spec']['clusterIP']}"


def client(cluster: Cluster, namespace: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address(cluster, namespace)}/v1", api_key="none", max_retries=0, timeout=120)


def uids(cluster: Cluster, namespace: str, selector: str) -> set[str]:
    return {one["metadata"]["uid"] for one in cluster.get("pods", "-l", selector, namespace=namespace)["items"]}


def says(sdk: openai.OpenAI, model: str) -> openai.types.chat.ChatCompletion:
    question: Any = [{"role": "user", "content": "Name the capital of France."}]
    return sdk.chat.completions.create(model=model, messages=question, max_tokens=12, temperature=0)


class Stream:
    """A long answer that is being read in a thread. A context manager."""

    def __init__(self, sdk: openai.OpenAI, model: str) -> None:
        self._sdk, self._model = sdk, model
        self.parts, self.end, self.error = 0, "", ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        """One answer after the other, so that one is always under way."""
        while not self._stop.is_set() and not self.error:
            try:
                made = self._sdk.completions.create(
                    model=self._model,
                    prompt="Once upon a time",
                    max_tokens=300,
                    stream=True,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
                for part in made:
                    self.parts += 1
                    self.end = part.choices[0].finish_reason or ""
                if self.end != "length":
                    self.error = f"ended with {self.end!r}"
            except (openai.OpenAIError, httpx.HTTPError) as error:
                self.error = repr(error)

    def __enter__(self) -> Stream:
        self._thread.start()
        eventually(lambda: self.parts > 5, 60)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(120)


@pytest.mark.smoke
def test_openais_client_reaches_both_models_by_all_their_names(cluster: Cluster, deployed: str) -> None:
    sdk = client(cluster, deployed)
    assert {one.id for one in sdk.models.list()} == {"one", "second", "deux", "gpt-4o-mini"}
    assert {one.id: one.owned_by for one in sdk.models.list()}["deux"] == "two"
    for name in ("one", "second", "deux", "gpt-4o-mini"):
        assert "Paris" in (says(sdk, name).choices[0].message.content or "")
    of = {"one": "one", "second": "two", "deux": "two", "gpt-4o-mini": "one"}
    assert {one["name"]: one["llmdeployment"] for one in models(cluster, deployed)} == of
    eventually(lambda: all(one["ready"] for one in models(cluster, deployed)), 60)  # a busy machine misses probes


def test_an_unknown_model_is_refused_in_the_clients_dialect(cluster: Cluster, deployed: str) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        says(client(cluster, deployed), "nobody")
    assert refused.value.code == "model_not_found"
    body = {"model": "nobody", "max_tokens": 4, "messages": [{"role": "user", "content": "?"}]}
    answer = httpx.post(f"{address(cluster, deployed)}/v1/messages", json=body, timeout=20)
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")


def test_a_third_model_is_routable_at_once_and_breaks_no_stream(cluster: Cluster, deployed: str) -> None:
    sdk = client(cluster, deployed)
    engines = uids(cluster, deployed, "app.kubernetes.io/component=engine")
    routers = uids(cluster, deployed, f"octavo.dev/llmgateway={NAME}")
    with Stream(sdk, "one") as stream:
        cluster.apply(llmd("three", replicas=0), namespace=deployed)
        began = time.monotonic()
        eventually(lambda: "three" in {one.id for one in sdk.models.list()}, 30, every=0.05)
        listed = time.monotonic() - began
        cluster.kubectl("scale", "llmd/three", "-n", deployed, "--replicas=1")
        eventually(lambda: condition(cluster, deployed, "llmd", "three", "Available") == "Serving", PATIENCE, every=0.1)
        began = time.monotonic()

        def answered() -> bool:
            with contextlib.suppress(openai.APIStatusError):
                return "Paris" in (says(sdk, "three").choices[0].message.content or "")
            return False

        eventually(answered, 30, every=0.05)
        routable = time.monotonic() - began
        print(f"\nlisted after {listed:.1f} s, routable {routable:.1f} s after it was available", end="")
        assert not stream.error
        cluster.kubectl("delete", "llmd", "three", "-n", deployed, "--timeout=60s")
        eventually(lambda: "three" not in {one.id for one in sdk.models.list()}, 30)
    assert not stream.error
    assert stream.parts > 50
    assert uids(cluster, deployed, f"octavo.dev/llmgateway={NAME}") == routers
    assert uids(cluster, deployed, "app.kubernetes.io/component=engine") >= engines
    assert listed <= ROUTABLE_SECONDS and routable <= ROUTABLE_SECONDS


def test_a_model_that_crashes_leaves_the_others_alone(cluster: Cluster, deployed: str) -> None:
    sdk = client(cluster, deployed)
    broken = llmd("broken")

    broken["spec"]["model"]["uri"] = "file:///nowhere.gguf"
    with Stream(sdk, "one") as stream:
        cluster.apply(broken, namespace=deployed)
        eventually(lambda: condition(cluster, deployed, "llmd", "broken", "Degraded") != "AsExpected", 120)
        found = {one["name"]: one["ready"] for one in models(cluster, deployed)}
        assert found["broken"] is False and found["one"] and found["second"]
        assert "Paris" in (says(sdk, "second").choices[0].message.content or "")
        assert condition(cluster, deployed, "llmg", NAME) == "Ready"
        assert condition(cluster, deployed, "llmg", NAME, "Degraded") == "AsExpected"
    assert not stream.error
    cluster.kubectl("delete", "llmd", "broken", "-n", deployed, "--timeout=60s")


def test_a_gateway_goes_and_takes_nothing_of_the_models(cluster: Cluster, deployed: str) -> None:
    cluster.apply(llmg("other", selector={"matchLabels": {"none": "such"}}, replicas=1), namespace=deployed)
    eventually(lambda: condition(cluster, deployed, "llmg", "other") == "Ready", 120)
    assert cluster.get("llmg", "other", namespace=deployed)["status"]["models"] == []
    engines = uids(cluster, deployed, "app.kubernetes.io/component=engine")
    cluster.kubectl("delete", "llmg", "other", "-n", deployed, "--timeout=60s")
    kinds, own = (
        "deployments,configmaps,services,networkpolicies,poddisruptionbudgets,pods",
        "octavo.dev/llmgateway=other",
    )
    eventually(lambda: not cluster.get(kinds, "-l", own, namespace=deployed)["items"], 120)
    assert uids(cluster, deployed, "app.kubernetes.io/component=engine") == engines
    assert "Paris" in (says(client(cluster, deployed), "one").choices[0].message.content or "")


def test_a_gateway_is_ready_again_once_all_of_its_routers_are_of_the_latest_spec(
    cluster: Cluster, installed: str
) -> None:
    name, cpu = "changed", "110m"
    nobody = {"selector": {"matchLabels": {"none": "such"}}}
    cluster.apply(llmg(name, **nobody, replicas=1), namespace=installed)
    eventually(lambda: condition(cluster, installed, "llmg", name) == "Ready", 120)
    eventually(lambda: condition(cluster, installed, "llmg", name, "Progressing") == "Complete", 20)
    resources = {"resources": {"requests": {"cpu": cpu}}}
    cluster.apply(llmg(name, **nobody, replicas=1, routing=resources), namespace=installed)

    def ready_again() -> bool:
        found = cluster.get("llmg", name, namespace=installed)
        ready = next(one for one in found["status"]["conditions"] if one["type"] == "Ready")
        return bool(ready["status"] == "True" and ready["observedGeneration"] == found["metadata"]["generation"])

    eventually(ready_again, 120, every=0.05)
    pods = cluster.get("pods", "-l", f"octavo.dev/llmgateway={name}", namespace=installed)["items"]
    new = [one for one in pods if one["spec"]["containers"][0]["resources"]["requests"]["cpu"] == cpu]
    assert any(each["type"] == "Ready" and each["status"] == "True" for each in new[0]["status"]["conditions"])
    cluster.kubectl("scale", "llmg", name, "-n", installed, "--replicas=2")
    eventually(ready_again, 120, every=0.05)
    assert cluster.get("deployment", f"{name}-router", namespace=installed)["status"]["availableReplicas"] == 2
    cluster.kubectl("delete", "llmg", name, "-n", installed, "--timeout=60s")


def test_one_of_a_models_name_is_degraded_and_touches_nothing_of_it(cluster: Cluster, deployed: str) -> None:
    before = {
        one["metadata"]["uid"]
        for one in cluster.get("services", "-l", "octavo.dev/llmdeployment=one", namespace=deployed)["items"]
    }
    cluster.apply(llmg("one"), namespace=deployed)
    eventually(lambda: condition(cluster, deployed, "llmg", "one", "Degraded") == "NameConflict", 30)
    assert not cluster.get("deployments,services,configmaps", "-l", "octavo.dev/llmgateway=one", namespace=deployed)[
        "items"
    ]
    cluster.kubectl("delete", "llmg", "one", "-n", deployed, "--timeout=60s")
    after = {
        one["metadata"]["uid"]
        for one in cluster.get("services", "-l", "octavo.dev/llmdeployment=one", namespace=deployed)["items"]
    }
    assert after == before


def test_an_idle_operator_writes_nothing(cluster: Cluster, deployed: str) -> None:
    eventually(lambda: condition(cluster, deployed, "llmg", NAME) == "Ready", 60)
    time.sleep(5)
    since = cluster.audit_log.stat().st_size
    time.sleep(20)
    with cluster.audit_log.open() as log:
        log.seek(since)
        written = [json.loads(line) for line in log]
    user = f"system:serviceaccount:{deployed}:"  # others may run beside it
    ours = [one for one in written if one["user"]["username"].startswith(user) and "leases" not in one["requestURI"]]
    assert [(one["verb"], one["requestURI"]) for one in ours] == []
