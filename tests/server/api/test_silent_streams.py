"""Streams in which nothing comes for long say that they live; a head that goes ahead, where that is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from octavo.entrypoints.errors import APIError
from octavo.entrypoints.generation import stream as streams
from octavo.entrypoints.generation.stream import EventStream
from octavo.entrypoints.transport.sse import COMMENT

PING = b"event: ping\n\n"


class Events:
    """Writes outputs as they are."""

    def write(self, item: tuple[int, bytes]) -> bytes:
        return item[1]

    def end(self) -> bytes:
        return b"end"

    def error(self, error: APIError) -> bytes:
        return b"error " + error.detail.message.encode()


class Engine:
    """Outputs that a test makes when it likes; None is the end."""

    def __init__(self) -> None:
        self.stream = SimpleNamespace(on_output=None, changed=True)
        self.finished, self._outputs = False, deque[Any]()

    def say(self, *outputs: bytes | Exception | None) -> None:
        self._outputs += outputs
        self.stream.on_output()

    def take(self) -> tuple[int, bytes] | None:
        if not self._outputs:
            return None
        output = self._outputs.popleft()
        if isinstance(output, Exception):
            raise output
        self.finished = output is None
        return None if output is None else (0, output)

    def close(self) -> None:
        pass


class Client:
    """Asks for a stream, and has what came of it."""

    def __init__(self, ping: bytes = PING, head_after: float | None = None) -> None:
        self.engine, self.status, self.pieces, self.ended = Engine(), None, list[bytes](), False
        self.response = EventStream(self.engine, Events(), head_after=head_after, ping=ping)
        self._gone = asyncio.Event()
        self.task = asyncio.create_task(
            self.response(
                {"type": "http", "path": "/v1/completions", "headers": [], "state": {}}, self._receive, self._send
            )
        )

    async def _receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.pieces += [message["body"]] if message["body"] else []
            self.ended = not message.get("more_body", False)

    async def until(self, holds: Callable[[], Any]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                await asyncio.sleep(0.001)

    def leave(self) -> None:
        self._gone.set()


async def others_ping() -> None:
    """Wait until another stream, as silent, has said three times that it lives."""
    other = Client(head_after=0.001)
    await other.until(lambda: other.pieces.count(COMMENT) >= 3)
    other.leave()
    await other.task


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SILENT_SECONDS", 0.01)
    monkeypatch.setattr(streams, "_LOOK_SECONDS", 0.01)


def run(test: Callable[[], Any]) -> None:
    asyncio.run(test())


@pytest.mark.usefixtures("impatient")
def test_a_stream_pings_between_events_and_never_before_the_first() -> None:
    async def test() -> None:
        client = Client()
        await others_ping()
        assert client.status is None and not client.pieces, "until then it may be refused"
        client.engine.say(b"one")
        await client.until(lambda: client.pieces.count(PING) >= 3)
        client.engine.say(b"two", None)
        await client.task
        assert client.pieces[0] == b"one" and client.pieces[-2:] == [b"two", b"end"] and client.ended
        assert {*client.pieces[1:-2]} == {PING}

    run(test)


@pytest.mark.usefixtures("impatient")
def test_a_head_goes_ahead_and_an_error_is_then_the_last_event() -> None:
    async def test() -> None:
        for last, expected in (((b"one", None), [b"one", b"end"]), ((APIError(503, "gone"),), [b"error gone"])):
            client = Client(head_after=0.001)
            await client.until(lambda: client.pieces.count(COMMENT) >= 3)  # noqa: B023
            assert client.status == 200 and {*client.pieces} == {COMMENT}, "no event may come before the first"
            client.engine.say(*last)
            await client.task
            assert [piece for piece in client.pieces if piece not in (COMMENT, PING)] == expected and client.ended

    run(test)


@pytest.mark.usefixtures("impatient")
def test_a_form_without_words_for_it_has_the_head_alone() -> None:
    async def test() -> None:
        client = Client(ping=b"", head_after=0.001)
        await client.until(lambda: client.status == 200)
        await others_ping()
        assert not client.pieces
        client.engine.say(b"one")
        await client.until(lambda: client.pieces)
        await others_ping()
        client.engine.say(None)
        await client.task
        assert client.pieces == [b"one", b"end"]

    run(test)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("head_after", [None, 1000.0])
def test_an_error_before_the_head_has_a_status_of_its_own(head_after: float | None) -> None:
    async def test() -> None:
        client = Client(head_after=head_after)
        await asyncio.sleep(0)
        client.engine.say(APIError(503, "gone"))
        await client.task
        assert client.status == 503
        for ahead in (None, 0.0):
            other = Client(head_after=ahead)
            other.leave()
            await other.task  # whoever leaves before the first event gets nothing more

    run(test)


PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x", "store": False},
    "/api/chat": {"messages": [{"role": "user", "content": "x"}], "options": {"num_predict": 3}},
}


def test_a_real_stream_has_its_head_while_the_engine_is_silent(start: Any) -> None:
    server = start("--stream-head-after", "0.01", "--clamp-max-tokens", "--kv-cache-memory-bytes", "32MiB")
    for path, fields in PATHS.items():
        body = {"model": server.get("/v1/models").json()["data"][0]["id"], "stream": True, **fields}
        body |= {"max_output_tokens": 3} if "input" in body else {} if "options" in body else {"max_tokens": 3}
        os.kill(server.core_pid, signal.SIGSTOP)
        with contextlib.ExitStack() as stack:
            stack.callback(os.kill, server.core_pid, signal.SIGCONT)
            stream = stack.enter_context(httpx.stream("POST", server.url + path, json=body, timeout=60))
            assert stream.status_code == 200
            pieces = stream.iter_raw()
            if "ndjson" not in stream.headers["content-type"]:
                assert next(pieces) == COMMENT
            os.kill(server.core_pid, signal.SIGCONT)
            text = b"".join(pieces)
            assert b"error" not in text.replace(b'"error":null', b"")
            if "api" in path:
                assert json.loads(text.splitlines()[-1])["done"] is True
            else:
                events = text.replace(COMMENT, b"")  # of a slow machine, where the core is silent for long
                assert events.count(b"data:") > 2 and events.startswith((b"data:", b"event:"))
    too_much = {"prompt": "x", "max_tokens": 10**6, "temperature": 0, "stop": ["e"]}
    assert server.post("/v1/completions", too_much).status_code == 200
    long = server.post("/v1/completions", {**too_much, "stop": [], "ignore_eos": True}).json()
    assert long["usage"]["total_tokens"] == 1024 and long["choices"][0]["finish_reason"] == "length"
