"""The server of gRPC calls: beside a client of the reference implementation, and with bytes that come in any pieces."""

from __future__ import annotations

import asyncio

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from support.serving import free_port

from octavo_router.calls import Connection, Stream, serve

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Lengths:
    """Answers each message with its length; ends the call, or fails, where a message asks for it."""

    open = 0

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        Lengths.open += 1

    def received(self, message: bytes) -> None:
        if message == b"fail":
            raise RuntimeError("a fault")
        self.stream.send(str(len(message)).encode())
        if message == b"end":
            self.stream.finish()

    def closed(self) -> None:
        Lengths.open -= 1
        self.stream.send(b"nobody hears this")


def test_a_grpc_client_finds_what_it_expects() -> None:
    grpc = pytest.importorskip("grpc", reason="needs a client: pip install grpcio")

    async def scene() -> None:
        port = free_port()
        server = await serve(Lengths, port)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        call = channel.stream_stream("/any/Method")

        async def talk(number: int) -> None:
            """Some send more than a window that nobody opens would let through; half of all leave in the middle."""
            stream = call()
            for length in (0, number, 70_000 * (number % 3), 33_000_000 if number == 7 else 1):
                await stream.write(bytes(length))
                assert await stream.read() == str(length).encode()
            if number % 2:
                stream.cancel()
            else:
                await stream.done_writing()
                assert await stream.read() is grpc.aio.EOF
                assert await stream.code() == grpc.StatusCode.OK

        await asyncio.gather(*map(talk, range(40)))
        for message, answers, code in ((b"end", [b"3"], "OK"), (b"fail", [], "INTERNAL")):
            stream = call()
            await stream.write(message)
            assert [await stream.read() for _ in answers] == answers
            assert await stream.code() == grpc.StatusCode[code]
        left = call()
        await left.write(b"x")
        assert await left.read() == b"1"
        while Lengths.open > 1:  # those that were cancelled end, too
            await asyncio.sleep(0.01)
        await channel.close()
        while Lengths.open:  # a connection that is gone ends its calls
            await asyncio.sleep(0.01)
        server.close()

    uvloop.run(asyncio.wait_for(scene(), 60))


class Wire(asyncio.Transport):
    """What a connection writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.is_closed = b"", False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True


class Heard:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.messages: list[bytes] = []
        self.ends = 0

    def received(self, message: bytes) -> None:
        assert not self.ends
        self.messages.append(message)

    def closed(self) -> None:
        self.ends += 1


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


OTHER = st.sampled_from(
    [
        frame(4, 0, 0, bytes(6)),
        frame(4, 1, 0),
        frame(6, 0, 0, b"12345678"),
        frame(8, 0, 0, bytes(4)),
        frame(2, 0, 1, bytes(5)),
        frame(99, 255, 3, b"?"),
        frame(3, 0, 77, bytes(4)),
    ]
)


@given(st.data())
def test_messages_are_the_same_in_whatever_pieces_they_come(data: st.DataObject) -> None:
    """Calls side by side, their messages cut into frames, some padded, between frames of no call, in pieces."""
    sent = data.draw(st.dictionaries(st.sampled_from([1, 3, 5]), st.lists(st.binary(max_size=300), max_size=4)))
    queues: dict[int, list[bytes]] = {}
    for number, messages in sent.items():
        text = b"".join(b"\0" + len(one).to_bytes(4) + one for one in messages)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        padded = data.draw(st.integers(0, 3))
        body = [
            frame(0, 8, number, bytes([padded]) + one + bytes(padded)) if padded else frame(0, 0, number, one)
            for one in parts
        ]
        end = data.draw(st.sampled_from([frame(0, 1, number), frame(3, 0, number, bytes(4)), frame(1, 5, number), b""]))
        queues[number] = [frame(1, 4, number, b"?"), *body, end]
    stream = PREFACE
    for number in sorted(queues):  # new calls have greater numbers
        stream += queues[number].pop(0)
    while any(queues.values()):
        number = data.draw(st.sampled_from([one for one in queues if queues[one]]))
        stream += queues[number].pop(0) + data.draw(st.just(b"") | OTHER)
    wire, calls = Wire(), list[Heard]()
    connection = Connection(lambda stream: calls.append(Heard(stream)) or calls[-1])  # type: ignore[func-returns-value]
    connection.connection_made(wire)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        connection.data_received(stream[a:b])
    assert [one.messages for one in calls] == [sent[number] for number in sorted(sent)]
    connection.connection_lost(None)
    assert [one.ends for one in calls] == [1] * len(calls)
    assert not wire.is_closed


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nHost: me\r\n\r\n", PREFACE + b"\xff" * 9])
def test_a_connection_that_is_no_call_of_envoy_is_closed(sent: bytes) -> None:
    wire = Wire()
    connection = Connection(Heard)
    connection.connection_made(wire)
    connection.data_received(sent)
    assert wire.is_closed
