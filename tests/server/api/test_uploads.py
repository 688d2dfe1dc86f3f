"""Files for batches: forms as clients write them, whatever else somebody sends, and what is kept of it."""

from __future__ import annotations

import asyncio
import re
import time
from types import SimpleNamespace

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Route
from support import batch_lines
from support.cpu_time import at_most

from octavo.entrypoints.batches.routes import upload_file
from octavo.entrypoints.batches.store import FileStore
from octavo.entrypoints.bodies import Bodies
from octavo.entrypoints.errors import APIError
from octavo.entrypoints.transport.multipart import parse_form
from octavo.entrypoints.transport.responses import route

LINE = batch_lines.good("a")


@given(st.dictionaries(st.from_regex("[a-z]{1,8}", fullmatch=True), st.binary(max_size=60), min_size=1, max_size=4))
def test_forms_are_read_as_clients_write_them(fields):
    files = {name: (f"{name}.bin", data) for name, data in fields.items()}
    request = httpx.Request("POST", "http://x", files=files, data={"purpose1": "batch"})
    form = parse_form(request.headers["content-type"], request.read())
    assert form.pop("purpose1").data == b"batch"
    assert {name: (part.filename, part.data) for name, part in form.items()} == files


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)


@given(TEXT, TEXT, st.binary(max_size=30))
def test_names_of_files_are_read_as_clients_write_them(name, filename, data):
    """They write quotes and control characters as addresses do (WHATWG's form), and backslashes twice."""
    request = httpx.Request("POST", "http://x", files={name: (filename, data)})
    form = parse_form(request.headers["content-type"], request.read())
    written = [re.sub(r'["\x00-\x1a\x1c-\x1f]', lambda found: f"%{ord(found[0]):02X}", one) for one in (name, filename)]
    assert [(one, part.filename, part.data) for one, part in form.items()] == [(*written, data)]


def test_older_clients_names_of_files_are_read():
    head = b'--b\r\ncontent-disposition: form-data; name=file; filename="C:\\dir\\a; b.txt"%b\r\n\r\nx\r\n--b--\r\n'
    for more, name in ((b"", "C:\\dir\\a; b.txt"), (b"; filename*=utf-8''na%C3%AFve.txt", "naïve.txt")):
        part = parse_form("multipart/form-data; boundary=b", head % more)["file"]
        assert (part.filename, part.data) == (name, b"x")


HEAD = b"--b\r\ncontent-disposition: form-data"
END = b"\r\n\r\nx\r\n--b--"


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (HEAD + b"; a=b" * 200_000 + END, "more than 8192 bytes"),
        (HEAD + b'; name="f"; filename="' + b"n" * 10_000 + b'"' + END, "more than 8192 bytes"),
        (HEAD + b'; a="' + b'\\"' * 4_000 + END, "no name"),
        (HEAD + b";" + b" " * 8_000 + END, "no name"),
        ((HEAD + b"; name=x\r\n\r\n\r\n") * 10_000, "more than 100 fields"),
        (b"\r\n--" * 1_000_000, "cut short"),
        (b"\r\n--bx" * 1_000_000, "no name"),
    ],
    ids=["parameters", "filename", "backslashes", "spaces", "fields", "ends", "boundaries"],
)
def test_hostile_forms_are_refused_at_once(body, word):
    with at_most(1.0, time.thread_time), pytest.raises(APIError, match=word):
        parse_form("multipart/form-data; boundary=b", body)
    with at_most(1.0, time.thread_time), pytest.raises(APIError):
        parse_form("multipart/form-data" + "; a=b" * 12_000 + "; boundary=b", body)


def test_uploads_are_counted_while_they_arrive():
    """Together they have their own room; what finds none is refused, and what has been read makes room again."""
    service = SimpleNamespace(uploads=Bodies(400_000), files=FileStore())
    app = Starlette(routes=[Route("/v1/files", route(upload_file), methods=["POST"])])
    app.state.batches = service
    files = {"purpose": (None, b"batch"), "file": ("in.jsonl", b"x" * 500_000)}
    form = httpx.Request("POST", "http://x", files=files)
    body, headers = form.read(), {"content-type": form.headers["content-type"]}

    async def run():
        go_on = asyncio.Event()

        async def pieces(wait: bool):
            for at in range(0, len(body) - 1000, 50_000):
                yield body[at : min(at + 50_000, len(body) - 1000)]
            if wait:
                await go_on.wait()
            yield body[-1000:]

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
            first = asyncio.create_task(http.post("/v1/files", content=pieces(True), headers=headers))
            while service.uploads.count < 200_000:
                await asyncio.sleep(0)
            others = [await http.post("/v1/files", content=pieces(False), headers=headers) for _ in range(2)]
            held = service.uploads.count
            go_on.set()
            return [await first, *others, await http.post("/v1/files", content=pieces(False), headers=headers)], held

    answers, held = asyncio.run(asyncio.wait_for(run(), 30))
    assert [answer.status_code for answer in answers] == [200, 429, 429, 200]
    assert "retry-after" in answers[1].headers and 0 < held < 400_000 and service.uploads.count == 0
    assert [file.bytes for file in service.files.listed()] == [500_000, 500_000]
    service.files.close()


def test_stored_files_and_batches_are_bounded(shared_server):
    client = shared_server.client()
    assert client.files.create(file=("n" * 255, LINE), purpose="batch").filename == "n" * 255
    with pytest.raises(openai.BadRequestError, match="256 characters, more than 255"):
        client.files.create(file=("n" * 256, b"x"), purpose="batch")
    for seconds in ("²", "9" * 5_000, "-3600", ""):
        form = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": seconds}
        answer = httpx.post(f"{shared_server.url}/v1/files", data=form, files={"file": b"x"}, timeout=90)
        assert answer.status_code == 400 and "expires_after.seconds must be" in answer.json()["error"]["message"]
    for half in ({"expires_after[anchor]": "created_at"}, {"expires_after[seconds]": "3600"}):
        form = {"purpose": "batch", **half}
        answer = httpx.post(f"{shared_server.url}/v1/files", data=form, files={"file": b"x"}, timeout=90)
        assert answer.status_code == 400 and "both of anchor and seconds" in answer.json()["error"]["message"]
    assert shared_server.get("/v1/files?limit=" + "9" * 5_000).status_code == 400
    source = client.files.create(file=LINE, purpose="batch")
    for metadata in ({"k" * 65: "v"}, {"k": "v" * 513}):
        body = {"input_file_id": source.id, "endpoint": batch_lines.URL, "completion_window": "24h"}
        answer = shared_server.post("/v1/batches", {**body, "metadata": metadata})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "metadata"


@given(st.binary(max_size=200))
def test_no_form_is_too_strange_to_be_refused(body):
    with pytest.raises(APIError):
        parse_form("multipart/form-data; boundary=b0undary", body)
    with pytest.raises(APIError):
        parse_form("application/json", body)
