"""Clients that are too slow or say too much are let go; others on the same server are not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn

from octavo.entrypoints.transport import http11
from octavo.entrypoints.transport.http11 import DirectBody, LimitedHttpProtocol
from octavo.entrypoints.transport.stream_body import DIRECT_BODY

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def echo(scope, receive, send) -> None:
    """Answers with the size of the body, once all of it is there."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    body = str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        yield


class Streamer:
    """Says as much as its client takes, until that leaves; and keeps book."""

    def __init__(self) -> None:
        self.bodies: list[DirectBody] = []
        self.left: list[float] = []

    async def __call__(self, scope, receive, send) -> None:
        body: DirectBody = scope["state"][DIRECT_BODY]
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})

        def talk() -> None:
            while body.is_writable:
                body.write(b"x" * 1_000)

        body.when_writable(talk)
        talk()
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.append(asyncio.get_running_loop().time())


@contextlib.asynccontextmanager
async def serving(app=echo) -> AsyncIterator[int]:
    config = uvicorn.Config(app, port=0, http=LimitedHttpProtocol, lifespan="off", log_config=None, ws="none")
    config.timeout_graceful_shutdown = 1
    server = _Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(http11, "HEAD_SECONDS", 0.4)
    monkeypatch.setattr(http11, "BODY_SECONDS", 0.4)
    monkeypatch.setattr(http11, "UNREAD_SECONDS", 0.4)
    monkeypatch.setattr(http11, "FIRST_PROBE_SECONDS", 0.1)
    monkeypatch.setattr(http11, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr(http11, "PROBE_REPLY_SECONDS", 0.1)


class Slow:
    """Answers after a while, unless its client leaves before."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.left = asyncio.Event()

    async def __call__(self, scope, receive, send) -> None:
        assert (await receive())["type"] == "http.request"
        gone = asyncio.ensure_future(receive())
        await asyncio.wait((gone,), timeout=self.seconds)
        if gone.done():
            self.left.set()
            return
        gone.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    length = next(
        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    return int(head.split()[1]), await reader.readexactly(length)


def run(conversation) -> None:
    async def main() -> None:
        async with serving() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await conversation(reader, writer)
            writer.close()

    asyncio.run(main())


async def expect_timeout(reader: asyncio.StreamReader) -> None:
    status, body = await read_answer(reader)
    assert status == 408 and json.loads(body)["error"]["code"] == "timeout"
    assert await asyncio.wait_for(reader.read(), 30) == b"", "and the connection is closed"


def test_a_connection_that_says_nothing():
    async def conversation(reader, writer) -> None:
        await expect_timeout(reader)

    run(conversation)


def test_headers_that_come_drop_by_drop():
    async def conversation(reader, writer) -> None:
        async def drip() -> None:
            with contextlib.suppress(ConnectionError):
                for _ in range(100):
                    writer.write(b"A")
                    await asyncio.sleep(0.05)

        writer.write(b"GET / HTTP/1.1\r\nX: ")
        task = asyncio.create_task(drip())
        await expect_timeout(reader)
        task.cancel()

    run(conversation)


def test_a_body_that_never_comes():
    async def conversation(reader, writer) -> None:
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        await expect_timeout(reader)

    run(conversation)


def test_a_slow_but_steady_body_is_waited_for(monkeypatch):
    """Longer than the time between two looks, at a small multiple of the least pace: this process may be held up."""
    monkeypatch.setattr(http11, "BODY_SECONDS", 1.0)

    async def conversation(reader, writer) -> None:
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 6000\r\n\r\n")
        for _ in range(30):
            writer.write(b"x" * 200)
            await writer.drain()
            await asyncio.sleep(0.06)
        assert await read_answer(reader) == (200, b"6000")

    run(conversation)


def test_a_connection_may_idle_between_requests():
    async def conversation(reader, writer) -> None:
        for _ in range(3):
            writer.write(GET)
            assert await read_answer(reader) == (200, b"0")
            await asyncio.sleep(0.7)
        writer.write(b"GET / HTTP/1.1\r\n")  # but what is begun is to be finished
        await expect_timeout(reader)

    run(conversation)


def test_pipelined_requests():
    async def conversation(reader, writer) -> None:
        writer.write(GET * 3)
        for _ in range(3):
            assert await read_answer(reader) == (200, b"0")

    run(conversation)


@pytest.mark.parametrize("pieces", [1, 20])
def test_a_head_beyond_the_limit(pieces):
    async def conversation(reader, writer) -> None:
        data = b"GET / HTTP/1.1\r\nX: " + b"a" * (http11.MAX_HEAD_BYTES + 10) + b"\r\n\r\n"
        step = len(data) // pieces + 1
        with contextlib.suppress(ConnectionError):
            for i in range(0, len(data), step):
                writer.write(data[i : i + step])
                await asyncio.sleep(0.001)
        status, body = await read_answer(reader)
        assert status == 431 and json.loads(body)["error"]["code"] == "head_too_large"

    run(conversation)


def test_a_head_just_below_the_limit_and_again_on_the_same_connection():
    async def conversation(reader, writer) -> None:
        for _ in range(3):
            writer.write(b"GET / HTTP/1.1\r\nX: " + b"a" * (http11.MAX_HEAD_BYTES - 100) + b"\r\n\r\n")
            assert await read_answer(reader) == (200, b"0")

    run(conversation)


def small_buffers(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    sock.connect(("127.0.0.1", port))
    return sock


def test_a_client_that_never_reads_is_let_go_and_costs_little():
    async def main() -> None:
        streamer = Streamer()
        async with serving(streamer) as port:
            with small_buffers(port) as sock:
                sock.sendall(GET)
                deadline = asyncio.get_running_loop().time() + 30
                while not streamer.left:
                    assert asyncio.get_running_loop().time() < deadline, "it is still waited for"
                    await asyncio.sleep(0.05)
                assert 0 < streamer.bodies[0].num_bytes < 10_000_000, "no more than the buffers hold"

    asyncio.run(main())


def test_a_client_that_reads_slowly_is_waited_for(monkeypatch):
    """Longer than one may leave all of it unread; what it catches up with is followed by more at once."""
    monkeypatch.setattr(http11, "UNREAD_SECONDS", 1.0)  # more than a busy machine may hold up this process

    async def main() -> None:
        streamer = Streamer()
        async with serving(streamer) as port:
            reader, writer = await asyncio.open_connection(sock=small_buffers(port), limit=4_096)
            writer.write(GET)
            for _ in range(12):
                for _ in range(300):
                    assert await asyncio.wait_for(reader.read(4_096), 30)
                await asyncio.sleep(0.1)
            assert not streamer.left
            writer.close()

    asyncio.run(main())


def test_a_client_that_leaves_ends_all_its_requests():
    """Also the one under way, when a further one waits behind it."""

    async def main() -> None:
        streamer = Streamer()
        async with serving(streamer) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET * 2)
            await reader.readexactly(1_000)
            await asyncio.sleep(0.05)
            writer.transport.abort()
            deadline = asyncio.get_running_loop().time() + 30
            while len(streamer.left) < len(streamer.bodies) or not streamer.left:
                assert asyncio.get_running_loop().time() < deadline, "the first one goes on"
                await asyncio.sleep(0.02)

    asyncio.run(main())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_half_closed_connection_gets_all_its_answers(loop, version):
    async def main() -> None:
        async with serving(Slow(0.3)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            first = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
            writer.write(first + first.replace(b"1.1", version.encode()))
            writer.write_eof()
            received = await asyncio.wait_for(reader.read(), 30)
        answers = received.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").split(b"\r\n\r\nok")
        assert [answer[:15] for answer in answers] == [b"HTTP/1.1 200 OK"] * 2 + [b""]
        assert b"connection: close" in answers[1].lower()
        assert version == "1.0" or b" 100 " in received, "the probe is on its way while the answer takes its time"

    asyncio.run(main()) if loop == "asyncio" else pytest.importorskip("uvloop").run(main())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("half_first", [False, True])
def test_a_client_that_closes_its_connection_ends_its_request(loop, half_first):
    """Also one that has closed only one half of it first."""

    async def main() -> None:
        app = Slow(60)
        async with serving(app) as port:
            sock = socket.create_connection(("127.0.0.1", port))
            sock.sendall(GET)
            if half_first:
                sock.shutdown(socket.SHUT_WR)
            await asyncio.sleep(0.05)
            sock.close()
            await asyncio.wait_for(app.left.wait(), 30)

    asyncio.run(main()) if loop == "asyncio" else pytest.importorskip("uvloop").run(main())


def test_a_half_closed_connection_whose_request_is_not_whole_is_closed():
    async def conversation(reader, writer) -> None:
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 30) == b""

    run(conversation)


OFFERS = [
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",  # Java's client
    b"Connection: keep-alive, upgrade\r\nUPGRADE: TLS/1.2\r\n",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\n",
    b"Connection: upgrade\r\nConnection: close\r\nUpgrade: a/1, b/2\r\n",
    b"Upgrade: h2c\r\n",  # says it without meaning it
]
BODIES = [
    (b"", 0),
    (b"Content-Length: 5\r\n", 5),
    (b"Transfer-Encoding: chunked\r\n", 7),
]


@pytest.mark.parametrize("offer", OFFERS, ids=["h2c", "tls", "websocket", "two", "alone"])
def test_offers_to_upgrade_change_nothing_however_the_bytes_arrive(offer: bytes) -> None:
    """The body is read, and so is the next request on the connection."""
    asyncio.run(ask_with(offer))


async def ask_with(offer: bytes) -> None:
    async with serving() as port:
        for framing, size in BODIES:
            body = b"4\r\nabcd\r\n3\r\nxyz\r\n0\r\n\r\n" if b"chunked" in framing else b"x" * size
            method = b"POST" if framing else b"GET"
            request = b"%b /path HTTP/1.1\r\nHost: x\r\n%b%b\r\n%b" % (method, offer, framing, body)
            closes = b"Connection: close" in offer
            for cut in range(1, len(request), 7):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request[:cut])
                await asyncio.sleep(0)
                writer.write(request[cut:] + (b"" if closes else GET))
                answers = await read_answers(reader, 1 if closes else 2)
                assert answers == [size, 0][: len(answers)] and len(answers) == (1 if closes else 2), (cut, answers)
                writer.close()


async def read_answers(reader: asyncio.StreamReader, count: int) -> list[int]:
    """The sizes that `echo` answers with."""
    sizes = []
    for _ in range(count):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert head.startswith(b"HTTP/1.1 200"), head
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        sizes.append(int(await reader.readexactly(int(length.split(b":")[1]))))
    return sizes


def test_an_offer_brings_no_head_past_the_limit() -> None:
    asyncio.run(ask_with_large_head())


async def ask_with_large_head() -> None:
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nX: " + b"x" * 70_000 + b"\r\n\r\n"
        )
        assert b" 431 " in await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)
        writer.close()
