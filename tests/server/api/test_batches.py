"""/v1/files and /v1/batches, through OpenAI's client."""

from __future__ import annotations

import asyncio
import errno
import json
import time
from types import SimpleNamespace

import httpx
import openai
import pytest
from openai.types import Batch, FileDeleted, FileObject
from support import batch_lines
from support.sdk_types import fits

from octavo.entrypoints.args import ServerArgs
from octavo.entrypoints.batches import service as batch_service
from octavo.entrypoints.batches import store
from octavo.entrypoints.batches.service import BatchService
from octavo.entrypoints.bodies import Bodies
from octavo.entrypoints.errors import APIError
from octavo.entrypoints.transport.responses import JSON

CHAT = {"messages": [{"role": "user", "content": "The quick brown fox"}], "max_tokens": 4, "temperature": 0}
URL = "/v1/chat/completions"


def line(custom_id: str, body: dict, url: str = URL) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode() + b"\n"


def wait_for(client: openai.OpenAI, batch, *states: str):
    deadline = time.monotonic() + 60
    while batch.status not in states:
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def test_a_batch_is_answered_line_by_line(shared_server):
    client = shared_server.client()
    lines = [line(f"c{i}", {**CHAT, "seed": i}) for i in range(5)]
    lines += [line("bad", {**CHAT, "temperature": -1}), b"{oops\n", line("c1", CHAT), line("t", {}, "/v1/completions")]
    source = client.files.create(file=("in.jsonl", b"".join(lines)), purpose="batch")
    assert (source.bytes, source.filename, source.purpose) == (sum(map(len, lines)), "in.jsonl", "batch")
    assert client.files.content(source.id).content == b"".join(lines)
    batch = client.batches.create(
        input_file_id=source.id, endpoint=URL, completion_window="24h", metadata={"who": "me"}
    )
    assert batch.status in ("validating", "in_progress") and batch.metadata == {"who": "me"}
    done = wait_for(client, batch, "completed")
    for path, kind in (
        (f"batches/{done.id}", Batch),
        (f"files/{source.id}", FileObject),
        ("batches", Batch),
        ("files", FileObject),
    ):
        raw = shared_server.get(f"/v1/{path}")
        entries = raw.json().get("data", [raw.json()])
        page = {"data", "first_id", "last_id", "has_more", "object"}
        assert entries and ("/" in path or raw.json().keys() == page)
        for entry in entries:
            fits(kind, json.dumps(entry))
    assert done.request_counts.model_dump() == {"total": 9, "completed": 5, "failed": 4}
    answers = [json.loads(raw) for raw in client.files.content(done.output_file_id).text.splitlines()]
    theirs = shared_server.post(URL, CHAT).json()["choices"]
    assert sorted(one["custom_id"] for one in answers) == ["c0", "c1", "c2", "c3", "c4"]
    for one in answers:
        assert one["error"] is None and one["response"]["status_code"] == 200
        assert one["response"]["body"]["choices"] == theirs
    errors = [json.loads(raw) for raw in client.files.content(done.error_file_id).text.splitlines()]
    by_id = {one["custom_id"]: one for one in errors}
    assert by_id["bad"]["response"]["status_code"] == 400 and "temperature" in by_id["bad"]["error"]["message"]
    assert "line 2, too" in by_id["c1"]["error"]["message"] and "url must be" in by_id["t"]["error"]["message"]
    assert "not valid JSON" in by_id[None]["error"]["message"]
    assert done.id in [one.id for one in client.batches.list(limit=2)]
    listed = client.files.list(purpose="batch_output")
    assert {done.output_file_id, done.error_file_id} <= {one.id for one in listed}
    first = client.files.list(limit=1)
    assert first.has_more and first.data[0].id != first.get_next_page().data[0].id
    assert fits(FileDeleted, httpx.delete(f"{shared_server.url}/v1/files/{source.id}").text).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(source.id)


def test_a_batch_is_cancelled(shared_server):
    client = shared_server.client()
    body = {**CHAT, "max_tokens": 200, "ignore_eos": True}
    source = client.files.create(file=b"".join(line(str(i), body) for i in range(400)), purpose="batch")
    batch, later = (
        client.batches.create(input_file_id=source.id, endpoint=URL, completion_window="24h") for _ in range(2)
    )
    wait_for(client, batch, "in_progress")
    with pytest.raises(openai.ConflictError, match="cancel that first"):
        client.files.delete(source.id)
    assert shared_server.post(URL, CHAT).status_code == 200  # others find room
    assert client.batches.cancel(later.id).status == "cancelled"
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = wait_for(client, batch, "cancelled")
    assert 0 <= done.request_counts.completed < 400 and done.cancelled_at
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_invalid_batches_are_refused(shared_server):
    client = shared_server.client()
    empty = client.files.create(file=b"\n\n", purpose="batch")
    batch = client.batches.create(input_file_id=empty.id, endpoint=URL, completion_window="24h")
    failed = wait_for(client, batch, "failed")
    assert failed.errors.data[0].code == "invalid_file"
    for request in (
        {"input_file_id": "file-none", "endpoint": URL, "completion_window": "24h"},
        {"input_file_id": empty.id, "endpoint": "/v1/images", "completion_window": "24h"},
        {"input_file_id": empty.id, "endpoint": URL, "completion_window": "1h"},
    ):
        answer = shared_server.post("/v1/batches", request)
        assert answer.status_code in (400, 404) and answer.json()["error"]["param"]
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=b"x", purpose="assistants")
    assert shared_server.post("/v1/files", {"file": "x"}).status_code == 415
    for path in ("/v1/files/x", "/v1/files/x/content", "/v1/batches/x"):
        assert shared_server.get(path).status_code == 404
    assert shared_server.get("/v1/files?limit=0").status_code == 400


def test_a_batch_has_the_servers_own_key(guarded):
    client = openai.OpenAI(base_url=f"{guarded.url}/llm/v1", api_key="secret-key", max_retries=0)
    source = client.files.create(file=line("a", CHAT), purpose="batch")
    batch = client.batches.create(input_file_id=source.id, endpoint=URL, completion_window="24h")
    assert wait_for(client, batch, "completed", "failed").request_counts.completed == 1


def test_bad_lines_harm_no_others(shared_server):
    client = shared_server.client()
    source = client.files.create(file=b"\n".join(batch_lines.LINES), purpose="batch")
    batch = client.batches.create(input_file_id=source.id, endpoint=batch_lines.URL, completion_window="24h")
    done = wait_for(client, batch, "completed", "failed")
    assert done.status == "completed", done.errors
    answers = [json.loads(raw) for raw in client.files.content(done.output_file_id).content.split(b"\n") if raw]
    assert sorted(one["custom_id"] for one in answers) == sorted(batch_lines.ANSWERED)
    assert all(one["response"]["body"]["choices"] for one in answers)
    errors = [json.loads(raw) for raw in client.files.content(done.error_file_id).content.split(b"\n") if raw]
    assert len(errors) == len(batch_lines.STRANGE) == done.request_counts.failed
    assert len({one["id"] for one in answers + errors}) == done.request_counts.total
    assert all(one["error"]["message"] and one["error"]["code"] != "server_error" for one in errors)
    names = {one["custom_id"] for one in errors}
    assert {"s1", "s2", "n1", "n2", "n3", "t1", "t2", "t3", "t4", "t5", "t6", "good 1"} <= names


class PanicException(BaseException):
    """What a library in Rust raises: no Exception."""


async def _answer(scope, receive, send) -> None:
    await asyncio.sleep(0.01)
    prompt = json.loads((await receive())["body"]).get("prompt", "")
    if prompt == "panic":
        raise PanicException
    if prompt == "fault":
        raise LookupError
    errors = {
        "no process": APIError(503, "images cannot be read now"),
        "too many": APIError(429, "300 sequences requested", code="too_many_sequences"),
        "ends": APIError(503, "The server is shutting down", code="draining"),
    }
    answer = errors[prompt].response() if prompt in errors else JSON({"choices": []})
    await answer(scope, receive, send)


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def service():
    config = SimpleNamespace(scheduler=SimpleNamespace(max_num_seqs=2))
    state = SimpleNamespace(
        args=ServerArgs(),
        model_name="tiny",
        engine=SimpleNamespace(config=config),
        bodies=Bodies(1 << 30),
        max_body_bytes=4 << 20,
        max_body_values=200_000,
        replica_tag="",
    )
    made = BatchService(_answer, state, Clock())
    yield made
    made.files.close()


def test_requests_that_were_not_sent_in_time_expire(service):
    async def run():
        source = service.files.add("in", b"".join(line(str(i), CHAT) for i in range(20)), "batch")
        batch = service.create(source.id, URL, None)
        while batch.request_counts.completed < 3:
            await asyncio.sleep(0.001)
        service._clock.now += 24 * 3600
        while batch.expired_at is None:
            await asyncio.sleep(0.001)
        return batch

    batch = asyncio.run(asyncio.wait_for(run(), 30))
    counts = batch.request_counts
    assert batch.status == "expired" and 3 <= counts.completed < 20 and counts.completed + counts.failed == 20
    errors = service.files.path(service.files.get(batch.error_file_id)).read_text()
    assert errors.count("batch_expired") == counts.failed


def finished(service, data: bytes):
    """The batch of a file, once it is over."""

    async def run():
        source = service.files.add("in", data, "batch")
        batch = service.create(source.id, URL, None)
        while batch.status not in batch_service.OVER:
            await asyncio.sleep(0.001)
        return batch

    return asyncio.run(asyncio.wait_for(run(), 30))


def test_a_line_at_which_the_application_fails_harms_no_others(service):
    prompts = ["panic", "fine", "fault", "no process", "fine", "too many", "fine"]
    batch = finished(service, b"".join(line(str(i), {"prompt": one}) for i, one in enumerate(prompts)))
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 3, 4)
    raw = service.files.path(service.files.get(batch.error_file_id)).read_text()
    codes = {one["custom_id"]: one["error"]["code"] for one in map(json.loads, raw.splitlines())}
    assert codes == {"0": "server_error", "2": "http_500", "3": "server_error", "5": "too_many_sequences"}
    batch = finished(service, b"".join(line(str(i), {"prompt": one}) for i, one in enumerate(["fine", "ends", "fine"])))
    assert batch.status == "failed" and batch.errors.data[0].code == "server_stopped"


def test_a_file_of_empty_lines_is_no_batch(service):
    batch = finished(service, b"\n" * (2 * batch_service.MAX_LINES + 1) + line("a", CHAT))
    assert batch.status == "failed" and batch.errors.data[0].code == "invalid_file"


def test_batches_that_are_forgotten_leave_no_files(service, monkeypatch):
    monkeypatch.setattr(batch_service, "MAX_BATCHES", 2)
    batches = [finished(service, line("a", CHAT) + b"{\n") for _ in range(4)]
    kept = {file.id for file in service.files.listed() if file.purpose == "batch_output"}
    assert kept == {file for batch in batches[2:] for file in (batch.output_file_id, batch.error_file_id)}


def test_files_that_cannot_be_written_are_not_kept(service, monkeypatch):
    files = service.files
    kept = files.add("a", b"12345", "batch")

    def no_room(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("builtins.open", no_room)
    for write in (lambda: files.add("b", b"678", "batch"), lambda: files.append(kept, b"678")):
        with pytest.raises(APIError, match="No space left"):
            write()
    monkeypatch.undo()
    assert files.listed() == [kept] and kept.bytes == 5 and files.path(kept).read_bytes() == b"12345"


def test_files_expire_and_are_bounded(service, monkeypatch):
    files = service.files
    kept = files.add("a", b"12345", "batch", lifetime=10)
    path = files.path(kept)
    monkeypatch.setattr(store, "MAX_STORE_BYTES", 8)
    with pytest.raises(APIError, match="delete some"):
        files.add("b", b"12345", "batch")
    with pytest.raises(APIError, match="delete some"):
        files.append(kept, b"6789")
    assert path.exists()
    service._clock.now += 10
    assert files.listed() == [] and not path.exists()
    monkeypatch.setattr(store, "MAX_FILES", 1)
    files.add("b", b"1", "batch")
    with pytest.raises(APIError, match="files already"):
        files.add("c", b"1", "batch")
    monkeypatch.setattr(store, "MAX_FILE_BYTES", 2)
    with pytest.raises(APIError, match="split it"):
        files.add("d", b"123", "batch")
