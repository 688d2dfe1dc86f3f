"""`status.start`: how long the last pod took, read once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.llmd import parsed
from support.worlds import status_of

from octavo.chat.tools.formats.table import TOOL_FORMATS
from octavo_operator.autoscaling.metrics_page import engine_start
from octavo_operator.kube.client import ApiError
from octavo_operator.metrics import Metrics, OperatorState, Snapshot
from octavo_operator.observed.pod_starts import EngineStart, PodStarts, ready_at, start_of

Json = dict[str, Any]
KEY = ("default", "toy")


def at(second: int) -> str:
    return f"2026-01-01T00:{second // 60:02}:{second % 60:02}Z"


def pod(name: str, created: int, ready: int | None, fetched: int = 0, restarts: int = 0) -> Json:
    done = {"exitCode": 0, "startedAt": at(created + 3), "finishedAt": at(created + 3 + fetched)}
    conditions = [{"type": "Ready", "status": "True", "lastTransitionTime": at(ready)}] if ready is not None else []
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "creationTimestamp": at(created)},
        "status": {
            "conditions": conditions,
            "initContainerStatuses": [{"name": "fetch", "state": {"terminated": done}}],
            "containerStatuses": [{"name": "engine", "restartCount": restarts, "ready": ready is not None}],
        },
    }


def pulled(message: str) -> Json:
    return {"reason": "Pulled", "message": message}


@pytest.mark.parametrize(
    ("message", "seconds"),
    [
        ('Successfully pulled image "a/b:1" in 1m2.5s (1m4s including waiting). Image size: 12 bytes.', 64.0),
        ('Successfully pulled image "a/b:1" in 312ms (312ms including waiting). Image size: 12 bytes.', 0.3),
        ('Successfully pulled image "a/b:1" in 4.25s', 4.2),
        ('Container image "a/b:1" already present on machine', 0.0),
    ],
)
def test_an_image_pull_is_read_from_its_event(message: str, seconds: float) -> None:
    assert start_of(pod("a", 0, 20), [pulled(message)], EngineStart())["imagePull"] == seconds


def test_unreadable_phases_are_left_out() -> None:
    found = start_of(pod("a", 0, 20, fetched=9), [], EngineStart())
    assert found == {
        "pod": "a",
        "readyAt": at(20),
        "fetch": 9.0,
        "ready": 20.0,
    }
    bare = pod("a", 5, 20)
    bare["status"]["initContainerStatuses"] = []
    found = start_of(bare, [], EngineStart({"load": 1.26, "ready": 3.0}, "qwen3_xml"))
    assert found == {"pod": "a", "readyAt": at(20), "load": 1.3, "ready": 15.0, "toolFormat": "qwen3_xml"}


def test_a_restarted_engine_tells_nothing_of_a_start() -> None:
    assert ready_at(pod("a", 0, 20)) == at(20)
    assert ready_at(pod("a", 0, 20, restarts=1)) is None
    assert ready_at(pod("a", 0, None)) is None


def test_phases_are_read_from_a_metrics_page() -> None:
    page = (
        b'# TYPE octavo:startup_seconds gauge\noctavo:startup_seconds{engine="0",model_name="m",phase="load"} 1.5\n'
        b'octavo:startup_seconds{engine="1",model_name="m",phase="load"} 2.5\n'
        b'octavo:startup_seconds{phase="ready"} NaN\nvllm:num_requests_running{} 1\n'
    )
    assert engine_start(page) == EngineStart({"load": 2.5})


@pytest.mark.parametrize("name", [*TOOL_FORMATS, "generic"])
def test_the_format_of_calls_is_read_from_a_metrics_page(name: str) -> None:
    told = 'octavo:chat_format_info{engine="0",model_name="m",tool_format="%s"} 1.0\n'
    assert engine_start((told % name).encode()).tool_format == name
    assert engine_start((told % f"{name} b").encode()).tool_format is None


class Api:
    """The events of pods, or a refusal; counts the requests."""

    def __init__(self, refuses: bool = False) -> None:
        self.asked: list[str] = []
        self.refuses = refuses

    async def call(self, method: str, path: str, params: Json) -> Json:
        self.asked.append(params["fieldSelector"])
        if self.refuses:
            raise ApiError(403, {"message": "events is forbidden"})
        return {"items": [pulled("Container image already present on machine")]}


async def settled(starts: PodStarts, pods: list[Json], recorded: Json | None) -> Json | None:
    """What `last` says once everything that it began to read is read."""
    starts.last(KEY, pods, recorded)
    for _ in range(5):
        await asyncio.sleep(0)
    return starts.last(KEY, pods, recorded)


def test_a_pod_is_asked_once_and_the_last_one_counts() -> None:
    api, changed, pages = Api(), [], []

    async def read_start(one: Json) -> EngineStart:
        pages.append(one["metadata"]["name"])
        return EngineStart({"load": 2.0})

    async def run() -> None:
        starts = PodStarts(api, changed.append)  # type: ignore[arg-type]
        starts.read_start = read_start
        a, b = pod("a", 0, 20), pod("b", 30, 60)
        assert starts.last(KEY, [a], None) is None
        first = await settled(starts, [a], None)
        assert first and first["pod"] == "a" and (first["load"], first["imagePull"]) == (2.0, 0.0)
        for _ in range(3):  # nothing is asked again
            assert await settled(starts, [a], first) == first
        second = await settled(starts, [a, b], first)
        assert second and (second["pod"], second["ready"]) == ("b", 30.0)
        assert await settled(starts, [a], second) == second, "its pod is gone: it was the last start all the same"
        assert await settled(starts, [pod("a", 0, None)], second) == second
        assert await settled(starts, [], second) == second

    asyncio.run(run())
    assert pages == ["a", "b"] and changed == [KEY, KEY]
    assert api.asked == ["involvedObject.uid=uid-a,reason=Pulled", "involvedObject.uid=uid-b,reason=Pulled"]


def test_a_new_operator_asks_nothing_of_a_start_that_the_status_tells() -> None:
    api = Api()

    async def run() -> None:
        recorded = {"pod": "b", "readyAt": at(60), "ready": 30.0}
        starts = PodStarts(api, lambda _: None)  # type: ignore[arg-type]
        assert await settled(starts, [pod("a", 0, 20), pod("b", 30, 60)], recorded) == recorded

    asyncio.run(run())
    assert api.asked == []


def test_the_pull_is_left_out_without_the_right_to_read_events() -> None:
    async def run() -> Json | None:
        return await settled(PodStarts(Api(refuses=True), lambda _: None), [pod("a", 0, 20)], None)  # type: ignore[arg-type]

    assert asyncio.run(run()) == {"pod": "a", "readyAt": at(20), "fetch": 0.0, "ready": 20.0}


@pytest.mark.parametrize(
    ("told", "status", "reason"), [("qwen3_xml", "True", "Known"), ("generic", "False", "Generic"), (None, None, None)]
)
def test_a_model_without_a_known_format_is_told_in_a_condition(
    told: str | None, status: str | None, reason: str | None
) -> None:
    start = {"pod": "a", "readyAt": at(20), "ready": 20.0, **({"toolFormat": told} if told else {})}
    by_kind = {condition["type"]: condition for condition in status_of(parsed(), start=start)["conditions"]}
    found = by_kind.get("ChatFormat", {})
    assert (found.get("status"), found.get("reason")) == (status, reason)
    assert told != "generic" or "--tool-call-parser" in found["message"]
    assert by_kind["Degraded"]["status"] == "False", "it serves all the same"


def test_status_and_metrics_tell_it() -> None:
    start = {"pod": "a", "readyAt": at(20), "imagePull": 4.0, "ready": 20.0}
    status = status_of(parsed(), start=start)
    assert status["start"] == start
    assert "start" not in status_of(parsed())
    metrics = Metrics(lambda: OperatorState(True, 0, 0, 0, None), 300.0)
    metrics.record(KEY, Snapshot.of(parsed(), status, []))
    page = metrics.expose().decode()
    name = 'octavo_llmdeployment_start_seconds{llmdeployment="toy",namespace="default",phase='
    assert f'{name}"image_pull"}} 4.0' in page and f'{name}"ready"}} 20.0' in page
    assert f'{name}"load"' not in page
