"""Node 0 of an engine over several nodes, while others connect."""

from __future__ import annotations

import socket
import threading

from octavo.executor.tls_channel import Greeted, TlsChannel, accept, connect
from octavo.system.channel import Kind

TOKEN = b"a secret"


WANTED = {(rank, role) for rank in (1, 2) for role in ("control", "tensors", "beats")}


class Listener:
    """Node 0's side of one handshake after another."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = self.socket.getsockname()
        self.greeted: list[Greeted | None] = []

    def take(self, token: bytes = TOKEN) -> threading.Thread:
        def run() -> None:
            self.greeted.append(accept(self.socket.accept()[0], token, WANTED))

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def pair(self, rank: int = 1, role: str = "tensors") -> tuple[TlsChannel, TlsChannel]:
        thread = self.take()
        client = connect(self.address, TOKEN, rank, role, 30)
        thread.join()
        greeted = self.greeted[-1]
        assert greeted is not None and (greeted.node, greeted.role) == (rank, role)
        return greeted.channel, client


def received(channel: TlsChannel) -> list[tuple[Kind, bytearray]]:
    channel.wait(90)
    return list(channel.receive())
