"""Responses in the background: they go on without their client, can be cancelled, and survive their server."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from support.sdk_types import fits

from octavo.entrypoints.storage.database import SqliteDatabase
from octavo.entrypoints.storage.runs import LEASE_SECONDS, NewRun, RunTables, Told
from octavo.entrypoints.storage.tables import Entry, StoredItem

OVER = ("completed", "incomplete", "failed", "cancelled")
LONG = {"model": "tiny", "input": "Hello", "max_output_tokens": 900, "temperature": 0, "extra_body": {"seed": 1}}
SHORT = {**LONG, "max_output_tokens": 20}
NEVER_ENDS = {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "string", "minLength": 880}}}}


@pytest.fixture(scope="module")
def serve(start):
    """Start a server on a file."""

    def serve(path: Path | str, *flags: str):
        names = ("--served-model-name", "tiny", "--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "4")
        return start(*names, "--responses-store", str(path), *flags)

    return serve


@pytest.fixture(scope="module")
def server(serve, tmp_path_factory):
    return serve(tmp_path_factory.mktemp("background") / "responses.db")


def wait(client: openai.OpenAI, response_id: str, statuses: tuple[str, ...] = OVER, seconds: float = 60) -> Any:
    until = time.monotonic() + seconds
    while (found := client.responses.retrieve(response_id)).status not in statuses:
        assert time.monotonic() < until, found.status
        time.sleep(0.05)
    return found


def events_of(server, response_id: str, after: int | None = None) -> list[dict[str, Any]]:
    """The events of a stored response, as they come, until the stream ends."""
    query = "stream=true" if after is None else f"stream=true&starting_after={after}"
    answer = server.get(f"/v1/responses/{response_id}?{query}")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    for event in data:
        fits(ResponseStreamEvent, event)
    return [json.loads(event) for event in data]


def test_it_is_queued_made_and_the_same_as_in_the_foreground(server) -> None:
    client = server.client()
    made = client.responses.create(**SHORT, background=True)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    done = wait(client, made.id)
    direct = client.responses.create(**SHORT)
    assert done.output_text == direct.output_text and done.usage.output_tokens == direct.usage.output_tokens
    assert done.status == direct.status and done.background and not direct.background
    fits(Response, server.get(f"/v1/responses/{made.id}").text)
    going_on = client.responses.create(**SHORT, previous_response_id=made.id, background=True)
    listed = client.responses.input_items.list(wait(client, going_on.id).id, order="asc").data
    assert [item.content[0].text for item in listed] == ["Hello", done.output_text, "Hello"]


def test_its_events_can_be_read_from_any_number_on_at_any_time(server) -> None:
    client = server.client()
    stream = client.responses.create(**LONG, **NEVER_ENDS, background=True, stream=True)
    seen = []
    for event in stream:
        seen.append(event)
        if len(seen) == 10:
            break
    stream.close()
    assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
    response_id = seen[0].response.id
    rest = events_of(server, response_id, seen[-1].sequence_number)  # it went on without its client
    whole = events_of(server, response_id)
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert rest == whole[10:] and [event.type for event in seen] == [event["type"] for event in whole[:10]]
    done = client.responses.retrieve(response_id)
    assert whole[-1]["type"] == f"response.{done.status}" and whole[-1]["response"]["id"] == response_id
    text = "".join(event["delta"] for event in whole if event["type"] == "response.output_text.delta")
    assert text == done.output_text and len(text) > 800
    with client.responses.stream(response_id=response_id) as again:
        *_, last = again
    assert last.type == "response.incomplete" and last.response.output_text == done.output_text
    assert events_of(server, response_id, whole[-1]["sequence_number"]) == []


def test_it_is_cancelled_and_frees_the_engine(server) -> None:
    client = server.client()
    made = client.responses.create(**LONG, **NEVER_ENDS, background=True)
    wait(client, made.id, ("in_progress",))
    gone = client.responses.cancel(made.id)
    assert gone.status == "cancelled" and client.responses.cancel(made.id) == gone == client.responses.retrieve(made.id)
    until = time.monotonic() + 90
    while "vllm:num_requests_running" in (page := server.get("/metrics").text) and not any(
        line.startswith("vllm:num_requests_running") and line.endswith(" 0.0") for line in page.splitlines()
    ):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert client.responses.retrieve(made.id).status == "cancelled"
    kinds = [event["type"] for event in events_of(server, made.id)]
    assert kinds[0] == "response.created" and "response.completed" not in kinds
    done = wait(client, client.responses.create(**SHORT, background=True).id)
    assert client.responses.cancel(done.id) == done, "it is over"


def test_more_than_half_of_what_runs_waits(server) -> None:
    """So that clients which wait for an answer find room; and what waits can be cancelled."""
    client = server.client()
    made = [client.responses.create(**LONG, **NEVER_ENDS, background=True).id for _ in range(4)]
    for name in made[:2]:
        wait(client, name, ("in_progress",))
    assert [client.responses.retrieve(name).status for name in made[2:]] == ["queued", "queued"]
    assert client.responses.create(**SHORT).output_text
    assert client.responses.cancel(made[3]).status == "cancelled"
    client.responses.delete(made[0])
    wait(client, made[2], ("in_progress", *OVER))
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made[0])
    for name in made[1:3]:
        client.responses.cancel(name)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_it_is_made_anew_after_its_server_has_ended(serve, tmp_path: Path, how: str) -> None:
    """After kill -9 and after SIGTERM; a stream from a number on begins again there, with higher numbers."""
    path = tmp_path / "responses.db"
    first = serve(path, "--shutdown-timeout", "0")
    client = first.client()
    one, other = ({"x-octavo-tenant": name, "x-octavo-tenant-id": f"{name}'s secret"} for name in ("one", "other"))
    made = client.responses.create(**LONG, **NEVER_ENDS, background=True, extra_headers=one)
    waiting = [client.responses.create(**SHORT, background=True).id for _ in range(4)]
    wait(client, made.id, ("in_progress",))
    seen = len(events_of_running(first, made.id))
    first.kill() if how == "kill" else first.stop()
    again = serve(path)
    client = again.client()
    assert client.responses.retrieve(made.id).status in ("queued", "in_progress", "incomplete", "completed")
    events = events_of(again, made.id, seen - 1)
    assert events[0]["type"] == "response.created" and events[0]["sequence_number"] >= seen
    assert [event["sequence_number"] for event in events] == list(
        range(events[0]["sequence_number"], events[0]["sequence_number"] + len(events))
    )
    done = wait(client, made.id)
    assert done.status in ("completed", "incomplete") and len(done.output_text) > 800
    assert all(wait(client, name).status in ("completed", "incomplete") for name in waiting)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id, extra_headers=other)
    page = again.get("/metrics").text
    assert "octavo:tenant_tokens_total{" in page and 'tenant="one"' in page, "its tokens are its tenant's"


def events_of_running(server, response_id: str) -> list[str]:
    """The first events of a response that runs."""
    lines = []
    with httpx.stream("GET", f"{server.url}/v1/responses/{response_id}?stream=true", timeout=90) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                lines.append(line)
            if len(lines) == 8:
                return lines
    return lines


@pytest.mark.parametrize(
    ("body", "says"),
    [({"background": True, "store": False}, "background needs store"), ({"background": 1}, "background")],
)
def test_what_cannot_be_put_there_is_refused_by_name(server, body: dict[str, Any], says: str) -> None:
    answer = server.post("/v1/responses", {"input": "x", **body})
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_what_was_made_in_the_foreground_has_no_events_and_no_cancel(server) -> None:
    client = server.client()
    made = client.responses.create(**SHORT)
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled, since it was created without background"):
        client.responses.cancel(made.id)
    assert server.get(f"/v1/responses/{made.id}?stream=true").json()["error"]["param"] == "stream"
    running = client.responses.create(**SHORT, background=True)
    wrong = server.get(f"/v1/responses/{running.id}?stream=true&starting_after=x")
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "starting_after"


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_leases_decide_who_makes_a_response() -> None:
    clock = Clock()
    tables = RunTables(SqliteDatabase(":memory:"), 1 << 30, 0, clock)
    entry = Entry("resp_1", "one a", 1, "queued", b"{}", [StoredItem(b"asked")])
    tables.begin(NewRun(entry, "first", "tiny", b"request"), Told(0, 2, b"a\n\nb\n\n"))
    clock.now += LEASE_SECONDS - 1
    assert tables.claim("second", ["tiny"], 9) == []
    tables.renew("first", ["resp_1"])
    clock.now += LEASE_SECONDS - 1
    assert tables.claim("second", ["tiny"], 9) == []
    clock.now += 1
    assert tables.claim("second", ["other"], 9) == [] and tables.claim("second", ["tiny"], 0) == []
    (run,) = tables.claim("second", ["tiny"], 9)
    assert (run.entry, run.request, run.attempt, run.next_number) == (entry, b"request", 2, 2)
    assert tables.events_after("resp_1", -1) == ([], "queued")
    assert not tables.advance("resp_1", "first", Told(2, 1, b"c\n\n"), None), "it came back too late"
    assert tables.advance("resp_1", "second", Told(2, 1, b"c\n\n"), None)
    assert tables.events_after("resp_1", 0) == ([(2, b"c\n\n")], "queued")
    tables.release("second")
    assert [run.attempt for run in tables.claim("third", ["tiny"], 9)] == [3]
    tables.delete("resp_1", None)
    assert not tables.advance("resp_1", "third", Told(3, 1, b"d\n\n"), None)
    assert tables.events_after("resp_1", -1) == ([], None)
    assert not tables._db.execute("SELECT id FROM runs UNION SELECT id FROM events")


def test_responses_that_run_neither_expire_nor_make_room() -> None:
    clock = Clock()
    tables = RunTables(SqliteDatabase(":memory:"), 1 << 20, 10, clock)
    tables.begin(NewRun(Entry("resp_1", "", 1, "queued", b"{}"), "first", "tiny", b""), Told(0, 1, b"a\n\n"))
    clock.now += 100
    tables.expire()
    for number in range(30):
        tables.put(Entry(f"resp_other_{number}", "", 1, "completed", os.urandom(60_000)))
    assert tables.count() < 20 and tables.events_after("resp_1", -1)[1] == "queued"
