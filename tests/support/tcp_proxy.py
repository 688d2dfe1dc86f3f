"""A TCP proxy that can freeze or cut its connections: a network that fails for one client alone."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class Proxy:
    """Listens on loopback and forwards to `target`, until `close`."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._open: list[_Connection] = []
        self._refusing = False
        self._frozen_ones_to_come = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self, *, also_new: bool = True) -> None:
        """Nothing gets through any more, and nobody is told; `also_new`: through later connections neither."""
        self._frozen_ones_to_come = also_new
        for one in self._open:
            one.is_frozen = True

    def thaw(self) -> None:
        self._frozen_ones_to_come = False
        for one in self._open:
            one.is_frozen = False

    def cut(self, *, refuse: bool = False) -> None:
        """Ends all connections; `refuse`: and takes none until `admit`."""
        self._refusing = refuse
        for one in self._open:
            one.close()
        self._open.clear()

    def admit(self) -> None:
        self._refusing = False

    def close(self) -> None:
        self._listener.close()
        self.cut(refuse=True)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._refusing:
                client.close()
                continue
            try:
                server = socket.create_connection(self._target)
            except OSError:  # there is none at this moment
                client.close()
                continue
            connection = _Connection(client, server, self._frozen_ones_to_come)
            self._open.append(connection)


class _Connection:
    def __init__(self, client: socket.socket, server: socket.socket, is_frozen: bool) -> None:
        self.is_frozen = is_frozen
        self._ends = (client, server)
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                while self.is_frozen:
                    time.sleep(0.02)
                sink.sendall(data)
        self.close()

    def close(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
