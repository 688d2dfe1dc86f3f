"""Channels between nodes: whom they let in, and that nobody reads or changes what goes over them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest
from support.node_listener import TOKEN, Listener, received

from octavo.executor.tls_channel import RefusedError, connect
from octavo.system.channel import Kind


@pytest.fixture
def listener() -> Listener:
    return Listener()


def test_both_directions_carry_frames(listener: Listener) -> None:
    server, client = listener.pair()
    for number in range(3):
        server.send(Kind.STEP, bytes([number]) * 100_000)
        client.send(Kind.SUM, b"")
        server.flush(5)
        frames: list[tuple[Kind, bytearray]] = []
        while not frames:
            frames = received(client)
        assert frames == [(Kind.STEP, bytearray([number]) * 100_000)] and received(server) == [(Kind.SUM, bytearray())]


def test_a_wrong_token_is_refused_on_both_sides(listener: Listener) -> None:
    thread = listener.take()
    with pytest.raises(RefusedError, match="another OCTAVO_CLUSTER_TOKEN"):
        connect(listener.address, b"wrong", 1, "control", 30)
    thread.join()
    assert listener.greeted == [None]
    thread = listener.take(b"of another node 0")
    with pytest.raises(RefusedError):
        connect(listener.address, TOKEN, 1, "control", 30)
    thread.join()


def test_a_rank_that_is_not_expected_is_not_taken(listener: Listener) -> None:
    thread = listener.take()
    with pytest.raises(ConnectionError, match="node 3"):
        connect(listener.address, TOKEN, 3, "control", 0)
    thread.join()
    assert listener.greeted == [None]


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\n\r\n" * 20, b"\x16\x03\x01\x00\x20" + bytes(64), b"\x16\x03\x01\xff\xff"]
)
def test_a_port_scan_is_harmless(sent: bytes, listener: Listener) -> None:
    thread = listener.take()
    with socket.create_connection(listener.address) as scanner:
        scanner.sendall(sent)
        with contextlib.suppress(OSError):  # it has been closed already
            scanner.shutdown(socket.SHUT_WR)
        thread.join(60)
    assert listener.greeted == [None]


class Recorder:
    """Between a node and node 0: hands on and keeps what the node sends."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.sent = b""
        self._address = address
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        node = self.listener.accept()[0]
        self.upstream = socket.create_connection(self._address)
        threading.Thread(target=self._copy, args=(self.upstream, node), daemon=True).start()
        while data := node.recv(65536):
            self.sent += data
            self.upstream.sendall(data)

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            target.sendall(data)


def test_replayed_messages_are_refused(listener: Listener) -> None:
    """A frame that comes again, and a whole connection."""
    recorder = Recorder(listener.address)
    thread = listener.take()
    client = connect(recorder.listener.getsockname(), TOKEN, 1, "control", 30)
    thread.join()
    handshake = len(recorder.sent)
    client.send(Kind.SUM, b"1")
    greeted = listener.greeted[-1]
    assert greeted is not None and received(greeted.channel) == [(Kind.SUM, b"1")]
    recorder.upstream.sendall(recorder.sent[handshake:])
    with pytest.raises(EOFError, match="not authentic"):
        received(greeted.channel)
    thread = listener.take()
    with socket.create_connection(listener.address) as again:
        again.sendall(recorder.sent)
        thread.join(60)
    assert listener.greeted[-1] is None


@pytest.mark.parametrize("wrong", ["changed", "cut", "left out"])
def test_a_frame_that_was_not_sent_so_is_refused(wrong: str, listener: Listener) -> None:
    server, client = listener.pair()
    client._push = lambda: None  # type: ignore[method-assign]
    client.send(Kind.SUM, b"12345678")
    data = bytearray(client._unsent)
    if wrong == "changed":
        data[-1] ^= 1
    elif wrong == "cut":
        data[4] -= 1
        del data[-1]
    else:
        data.clear()
    client._unsent.clear()
    client.send(Kind.SUM, b"next")
    client._socket.sendall(data + client._unsent)
    with pytest.raises(EOFError, match="not authentic"):
        received(server)


def test_traffic_between_nodes_cannot_be_read(listener: Listener) -> None:
    recorder = Recorder(listener.address)
    thread = listener.take()
    client = connect(recorder.listener.getsockname(), TOKEN, 1, "control", 30)
    thread.join()
    client.send(Kind.SUM, b"a private prompt")
    greeted = listener.greeted[-1]
    assert greeted is not None and received(greeted.channel) == [(Kind.SUM, b"a private prompt")]
    assert b"private" not in recorder.sent and TOKEN not in recorder.sent


def test_one_thread_may_send_while_another_receives(listener: Listener) -> None:
    """Each direction of a connection is whole when both are busy: node 0 hands on stages' states in such a thread."""
    server, client = listener.pair()
    frames = [os.urandom(size) for size in (1, 16_384, 300_000) * 30]

    def send() -> None:
        for data in frames:
            server.send(Kind.TENSOR, data)
            assert server.flush(60)

    thread = threading.Thread(target=send)
    thread.start()
    sent, got, back = iter(frames), list[bytes](), list[bytes]()
    while len(got) < len(frames) or len(back) < len(frames):
        if data := next(sent, b""):
            client.send(Kind.TENSOR, data)
        client.wait(0.01)
        got += [bytes(payload) for _, payload in client.receive()]
        back += [bytes(payload) for _, payload in server.receive()]
    thread.join()
    assert got == frames and back == frames
