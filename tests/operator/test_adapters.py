"""LoRA adapters of a fleet: who is asked when, what is told of it, and what makes new pods."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import time
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from support.llmd import parsed, store_of
from support.worlds import world

from octavo_operator.config import OperatorConfig
from octavo_operator.deployment.events import events
from octavo_operator.deployment.reconcile import reconcile
from octavo_operator.kube.store import Observed
from octavo_operator.lora.reader import AdapterReader
from octavo_operator.lora.summary import (
    PATIENCE_SECONDS,
    AdapterState,
    PodAdapters,
    is_behind,
    next_to_ask,
    parse_report,
    summarize,
    wanted_entries,
)
from octavo_operator.render import expected_template, render
from octavo_operator.render.lora import LISTED, adapter_list, list_digest, listed
from octavo_operator.writes.plan import Annotate, Apply, pod_spec_digest

CONFIG = OperatorConfig(engine_image="example.com/engine:1")
SQL = {"name": "sql", "uri": "hf://org/sql", "revision": "abc"}
RHYME = {"name": "rhyme", "uri": "s3://bucket/rhyme", "digest": f"sha256:{'0' * 64}"}


class Pod:
    """An engine as the operator meets it: it reads its list when it is asked to, and loads what that names, one after
    the other. `fails`: names that it cannot use."""

    def __init__(self, uid: str, fails: frozenset[str] = frozenset(), answers: bool = True) -> None:
        self.uid, self.fails, self.answers = uid, fails, answers
        self.read: dict[str, Any] = {"digest": "", "entries": {}}
        self.loaded: dict[str, Any] = {}

    def reload(self, deployment: Any) -> None:
        self.read = {"digest": list_digest(deployment), "entries": wanted_entries(deployment)}
        self.loaded = {name: entry for name, entry in self.loaded.items() if self.read["entries"].get(name) == entry}

    def work(self) -> bool:
        """Whether it got on with one."""
        todo = [name for name in self.read["entries"] if name not in self.loaded and name not in self.fails]
        if todo:
            self.loaded[todo[0]] = self.read["entries"][todo[0]]
        return bool(todo)

    def reports(self) -> PodAdapters:
        states = {}
        for name, entry in self.read["entries"].items():
            reason = "WrongBase" if name in self.fails else ""
            states[name] = AdapterState(entry, name in self.loaded, reason, reason and "why", "d")
        return PodAdapters(self.read["digest"], states)

    @property
    def body(self) -> dict[str, Any]:
        return {"metadata": {"uid": self.uid, "name": self.uid}, "status": {"phase": "Running"}}


names = st.sampled_from([f"a{number}" for number in range(6)])
entries = st.dictionaries(names, st.sampled_from(["hf://org/x", "hf://org/y"]), max_size=5).map(
    lambda found: [{"name": name, "uri": uri} for name, uri in found.items()]
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("list"), entries),
        st.tuples(st.sampled_from(["restart", "new", "ask", "work"]), st.integers(0, 3)),
    ),
    max_size=30,
)


@given(steps, st.sets(names, max_size=2), st.integers(1, 4))
def test_all_pods_converge_to_the_wanted_adapters(history: list[tuple[str, Any]], broken: set[str], count: int) -> None:
    """Lists change, pods restart and are replaced; then nothing happens any more but what the plan asks for. Each pod
    then has all adapters but the broken ones, and never were two asked while one of them loaded."""
    pods = [Pod(f"p{number}", frozenset(broken)) for number in range(count)]
    deployment, now, asked = parsed(adapters=[]), 0.0, dict[str, float]()

    def ask() -> Pod | None:
        reports = {pod.uid: pod.reports() for pod in pods if pod.answers}
        uid = next_to_ask(list_digest(deployment), [pod.uid for pod in pods], reports, asked, now)
        found = next((pod for pod in pods if pod.uid == uid), None)
        if found:
            others = [one for one in pods if one is not found and one.reports().is_loading]
            current = [one for one in others if one.read["digest"] == list_digest(deployment)]
            assert all(now - asked.get(one.uid, float("-inf")) >= PATIENCE_SECONDS for one in current)
            assert found.read["digest"] != list_digest(deployment), "a pod that is up to date is left alone"
            asked[found.uid] = now
            found.reload(deployment)
        return found

    for what, value in history:
        now += 1
        if what == "list":
            deployment = parsed(adapters=value)
        elif what == "ask":
            ask()
        else:
            at = value % len(pods)
            if what == "restart":  # it reads what the kubelet has brought, perhaps an older list
                pods[at] = Pod(pods[at].uid, frozenset(broken))
            elif what == "new":
                pods[at] = Pod(f"{pods[at].uid}'", frozenset(broken))
            else:
                pods[at].work()
    for _ in range(20 * len(pods)):
        now += 1
        ask()
        for pod in pods:
            pod.work()
    wanted = {one.name for one in deployment.spec.adapters or ()}
    for pod in pods:
        assert pod.loaded.keys() == wanted - broken
        assert not is_behind(list_digest(deployment), pod.reports()), "nobody is read again and again for ever"
    found = summarize(deployment, [pod.body for pod in pods], {pod.uid: pod.reports() for pod in pods})
    assert found is not None
    for one in found.adapters:
        assert (one["ready"], one["of"]) == (0 if one["name"] in broken else len(pods), len(pods))
        assert one.get("reason") == ("WrongBase" if one["name"] in broken else None)
    assert found.condition[0] is not bool(wanted & broken)


def test_a_pod_that_is_silent_or_never_gets_its_list_holds_up_nobody() -> None:
    deployment = parsed(adapters=[SQL])
    pods = [Pod("a"), Pod("b"), Pod("c")]
    reports = {"b": pods[1].reports(), "c": pods[2].reports()}  # a does not answer
    first = next_to_ask(list_digest(deployment), ["a", "b", "c"], reports, {}, 0)
    assert first == "b"
    assert next_to_ask(list_digest(deployment), ["a", "b", "c"], reports, {"b": 0}, 1) == "c", "b has no news of it yet"
    pods[1].reload(deployment)
    reports["b"] = pods[1].reports()
    assert next_to_ask(list_digest(deployment), ["a", "b", "c"], reports, {"b": 0}, 1) is None, "b loads"
    assert next_to_ask(list_digest(deployment), ["a", "b", "c"], reports, {"b": 0}, PATIENCE_SECONDS) == "c"


def test_status_counts_adapters_by_pod_and_names_failures() -> None:
    deployment = parsed(adapters=[SQL, RHYME, {"name": "lost", "uri": "pvc://claim/x"}])
    pods = [Pod("a"), Pod("b", frozenset({"sql"}))]
    for pod in pods:
        pod.reload(deployment)
        pod.work(), pod.work()
    ending, ended = {"uid": "c", "deletionTimestamp": "now"}, {"phase": "Failed"}
    bodies = [pod.body for pod in pods] + [{"metadata": ending}, {"metadata": {"uid": "d"}, "status": ended}]
    found = summarize(deployment, bodies, {pod.uid: pod.reports() for pod in pods})
    assert found is not None
    sql, rhyme, lost = found.adapters
    assert sql == {"name": "sql", "ready": 1, "of": 2, "reason": "WrongBase", "message": "why"}
    assert rhyme == {"name": "rhyme", "ready": 2, "of": 2}
    assert (lost["ready"], lost["reason"]) == (0, "PVCNotMounted")
    assert found.condition[:2] == (False, "WrongBase") and "sql: 1 of 2 pods" in found.condition[2]
    assert summarize(parsed(), bodies, {}) is None
    none = summarize(parsed(adapters=[SQL]), [], {})
    assert none is not None and none.condition[:2] == (None, "NoReplica")
    starting = summarize(parsed(adapters=[SQL]), bodies[:1], {})
    assert starting is not None and starting.condition[:2] == (False, "Loading")
    other = AdapterState(("hf://org/sql", "abc", ""), True, digest="e")
    reports = {"a": pods[0].reports(), "b": PodAdapters("", {"sql": other})}
    mixed = summarize(parsed(adapters=[SQL]), bodies[:2], reports)
    assert mixed is not None and mixed.condition[1] == "DigestMismatch"


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["adapters", "listed", "name", "state", "served", "x"]), inner)
        ),
    )
)
def test_any_answer_of_a_pod_is_read_or_refused(answer: Any) -> None:
    try:
        parse_report(answer)
    except ValueError:
        pass


def test_a_report_of_the_engine_is_read() -> None:
    state = {"name": "sql", "state": "failed", "served": True, "uri": "u", "revision": "r", "reason": "RankTooHigh"}
    found = parse_report({"listed": "x", "adapters": [state, {"name": "a", "state": "loading", "served": False}]})
    assert found.states["sql"] == AdapterState(("u", "r", ""), False, "RankTooHigh")
    assert found.is_loading and found.listed == "x"


@pytest.mark.parametrize(
    ("before", "after", "rolls"),
    [
        ({}, {"adapters": []}, True),
        ({"adapters": []}, {"adapters": [SQL]}, False),
        ({"adapters": [SQL]}, {"adapters": [SQL, RHYME]}, False),
        ({"adapters": [SQL, RHYME]}, {"adapters": [RHYME]}, False),
        ({"adapters": [SQL]}, {"adapters": [{**SQL, "revision": "other"}]}, False),
        ({"adapters": []}, {"adapters": [], "maxLoras": 2}, True),
        ({"adapters": []}, {"adapters": [], "maxRank": 32}, True),
        ({"adapters": []}, {"adapters": [], "adapterCredentialsSecretRef": {"name": "s"}}, True),
        ({"adapters": []}, {}, True),
    ],
)
def test_only_some_changes_make_new_pods(before: Any, after: Any, rolls: bool) -> None:
    one, other = parsed(**before), parsed(**after)
    assert (pod_spec_digest(one) != pod_spec_digest(other)) is rolls
    assert (expected_template(one, CONFIG) != expected_template(other, CONFIG)) is rolls


def test_the_list_reaches_the_pods_without_a_new_one() -> None:
    deployment = parsed(adapters=[SQL])
    template = expected_template(deployment, CONFIG)
    (engine,) = template["spec"]["containers"]
    mount = next(one for one in engine["volumeMounts"] if one["name"] == "octavo-adapters")
    flag = engine["args"].index("--lora-list")
    assert engine["args"][flag + 1] == f"{mount['mountPath']}/adapters.json"
    assert "subPath" not in mount, "a file that is mounted alone never changes"
    (fetch,) = template["spec"]["initContainers"]
    assert not any("adapter" in one["name"] for one in fetch["volumeMounts"])
    config_map = next(one for one in render(deployment, CONFIG) if one["metadata"]["name"] == "toy-adapters")
    text = config_map["data"]["adapters.json"]
    assert json.loads(text) == {"adapters": [SQL]} and text == adapter_list(deployment)
    assert hashlib.sha256(text.encode()).hexdigest() == list_digest(deployment)
    secret = parsed(adapters=[SQL], adapterCredentialsSecretRef={"name": "s"})
    volumes = {one["name"]: one for one in expected_template(secret, CONFIG)["spec"]["volumes"]}
    projected = volumes["octavo-adapter-credentials"]["projected"]["sources"]
    assert projected == [{"secret": {"name": "s"}}], "one volume, whatever the number of adapters"


def test_running_pods_are_told_at_once_and_only_once() -> None:
    deployment = parsed(adapters=[SQL])
    first = reconcile(deployment, world(), CONFIG)
    live = []
    for action in first.plan.actions:
        assert isinstance(action, Apply)
        body = json.loads(json.dumps(action.manifest))
        body["metadata"] |= {"uid": body["kind"], "resourceVersion": "1", "generation": 1}
        live.append(Observed.of(body["kind"], body["apiVersion"], body))
    template = expected_template(deployment, CONFIG)

    def pod(name: str, stamp: str) -> Observed:
        meta = {**template["metadata"], "annotations": {LISTED: stamp}, "name": name, "namespace": "default"}
        meta |= {"uid": name, "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
        return Observed.of("Pod", "v1", {"metadata": meta, "spec": template["spec"], "status": {}})

    children = [*live, pod("new", ""), pod("told", list_digest(deployment))]
    actions = reconcile(deployment, world(children, now=1.0), CONFIG).plan.actions
    assert [(one.target.name, one.annotations) for one in actions if isinstance(one, Annotate)] == [
        ("new", {LISTED: list_digest(deployment)})
    ]
    assert len(actions) == 1


def test_events_tell_of_broken_ones_and_of_their_end() -> None:
    def status(value: str, reason: str) -> dict[str, Any]:
        return {"conditions": [{"type": "AdaptersReady", "status": value, "reason": reason, "message": "m"}]}

    told = [
        events(status("True", "Loaded"), status("False", "Loading")),
        events(status("False", "Loading"), status("False", "RankTooHigh")),
        events(status("False", "RankTooHigh"), status("True", "Loaded")),
    ]
    assert [[(one.kind, one.reason) for one in some] for some in told] == [
        [],
        [("Warning", "RankTooHigh")],
        [("Normal", "AdaptersReady")],
    ]


@pytest.mark.parametrize(
    ("spec", "uri"),
    [
        ({"model": {"uri": "pvc://claim/m"}}, "file:///models/a/b"),
        ({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "claim"}}]}, None),
        (
            {
                "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "claim"}}],
                "volumeMounts": [{"name": "v", "mountPath": "/mine"}],
            },
            "file:///mine/a/b",
        ),
        (
            {
                "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "claim"}}],
                "volumeMounts": [{"name": "v", "mountPath": "/mine", "subPath": "a"}],
            },
            "file:///mine/b",
        ),
        (
            {
                "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "claim"}}],
                "volumeMounts": [{"name": "v", "mountPath": "/mine", "subPath": "c"}],
            },
            None,
        ),
        (
            {"model": {"uri": "hf://o/n", "cache": {"mode": "pvc", "pvc": {"existingClaim": "claim"}}}},
            "file:///cache/a/b",
        ),
    ],
)
def test_claims_are_read_where_the_pods_mount_them(spec: dict[str, Any], uri: str | None) -> None:
    deployment = parsed(**spec, adapters=[{"name": "x", "uri": "pvc://claim/a/b"}])
    assert listed(deployment).get("x", {}).get("uri") == uri


class Engines:
    """Management ports of pods: each loads for a moment after it was asked to, and notes how many do at a time."""

    def __init__(self) -> None:
        self.lists: dict[int, str] = {}
        self.loading: set[int] = set()
        self.most_loading = 0
        self.order: list[int] = []
        self.digest = ""

    async def start(self, count: int) -> list[int]:
        ports = []
        for number in range(count):
            app = web.Application()
            app.router.add_get("/v1/adapters", functools.partial(self._answer, number))
            app.router.add_post("/v1/adapters/reload", functools.partial(self._reload, number))
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            ports.append(runner.addresses[0][1])
        return ports

    async def _reload(self, number: int, request: web.Request) -> web.Response:
        self.order.append(number)
        self.loading.add(number)
        self.most_loading = max(self.most_loading, len(self.loading))
        self.lists[number] = self.digest
        asyncio.get_running_loop().call_later(0.2, self.loading.discard, number)
        return await self._answer(number, request)

    async def _answer(self, number: int, _: web.Request) -> web.Response:
        state = "loading" if number in self.loading else "loaded"
        states = [{"name": "sql", "state": state, "served": True, "uri": SQL["uri"], "revision": SQL["revision"]}]
        return web.json_response({"listed": self.lists.get(number, ""), "adapters": states})


def test_the_reader_asks_one_pod_after_the_other_and_then_lets_them_be() -> None:
    async def run() -> None:
        engines, changes = Engines(), []
        ports = await engines.start(3)
        store = store_of(adapters=[SQL])
        for number, port in enumerate([*ports, 1]):  # the last one does not answer
            container = {"name": "engine", "ports": [{"name": "management", "containerPort": port}]}
            meta = {
                "name": f"p{number}",
                "namespace": "default",
                "uid": f"p{number}",
                "resourceVersion": "1",
                "labels": {"octavo.dev/llmdeployment": "toy", "app.kubernetes.io/component": "engine"},
            }
            pod = {"metadata": meta, "spec": {"containers": [container]}, "status": {"podIP": "127.0.0.1"}}
            store.put(Observed.of("Pod", "v1", pod))
        engines.digest = list_digest(parsed(adapters=[SQL]))
        reader = AdapterReader(store, changes.append)
        leading = asyncio.Event()
        leading.set()
        running = asyncio.create_task(reader.run(leading))
        deadline = time.monotonic() + 90

        def is_done(uid: str) -> bool:
            found = reader.reports(("default", "toy")).get(uid, PodAdapters(""))
            return found.listed == engines.digest and not is_behind(engines.digest, found)

        while not all(is_done(f"p{number}") for number in range(3)):
            assert time.monotonic() < deadline, reader.reports(("default", "toy"))
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.2)
        running.cancel()
        await reader.close()
        assert sorted(engines.order) == [0, 1, 2], "each once"
        assert engines.most_loading == 1
        assert set(changes) == {("default", "toy")}

    asyncio.run(run())
