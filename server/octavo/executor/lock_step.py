"""Engines that deal a mixture's experts to one another step together: before each step they tell how many rows they
have, and one without any takes part as long as another has some.

Each sends every other one message a step, and waits for theirs: the first message also wakes those that have slept
since a step in which nobody had rows.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

from octavo.errors import OctavoError
from octavo.interface.engine_config import ParallelConfig
from octavo.layers.parallel import Replicas
from octavo.system import limits
from octavo_kernels.cpu import SharedMemory, create_shared_memory

_ROWS = struct.Struct("=q")
_LAST_WORDS = 2.0  # seconds in which this process is ended too, where another has ended because the server does


class LockStep:
    """One of the engines. All make the same calls in the same order."""

    def __init__(self, number: int, sockets: Sequence[socket.socket], parallel: ParallelConfig) -> None:
        """``number``: of this engine's core; ``sockets``: to each of the others, in their order."""
        self._number, self._timeout = number, parallel.distributed_timeout_seconds
        others = (other for other in range(len(sockets) + 1) if other != number)
        self._sockets = dict(zip(others, sockets, strict=True))
        self._poll = select.poll()
        for sock in sockets:
            sock.settimeout(self._timeout)
            self._poll.register(sock, select.POLLIN)
        self._is_awake = False  # somebody had rows in the last step

    @property
    def descriptors(self) -> list[int]:
        """Sockets of the other engines: one becomes readable once its engine begins a step."""
        return [sock.fileno() for sock in self._sockets.values()]

    def share_memory(self) -> Replicas:
        """Share the memory through which all experts exchange: the first engine creates it and hands it to the others.
        Raises OctavoError if it does not."""
        ranks = len(self._sockets) + 1
        if self._number == 0:
            descriptor = create_shared_memory(ranks, self._timeout, limits.cpu_count() >= ranks)
            for sock in self._sockets.values():
                with suppress(OSError):  # one that has ended, as its parent notices
                    socket.send_fds(sock, [b"f"], [descriptor])
        else:
            try:
                _, descriptors, _, _ = socket.recv_fds(self._sockets[0], 1, 1)
            except OSError:
                descriptors = []
            if not descriptors:
                raise OctavoError(f"core 0, which has some of the experts, did not begin within {self._timeout:g} s")
            (descriptor,) = descriptors
        memory = SharedMemory(descriptor, self._number, ranks)
        os.close(descriptor)
        return Replicas(self._number, ranks, memory)

    def is_called(self) -> bool:
        """True if there is a step to take part in, with or without rows."""
        return self._is_awake or bool(self._poll.poll(0))

    def begin_step(self, rows: int) -> list[int]:
        """Wait until all begin a step, this one with ``rows``; returns everybody's. Raises RuntimeError when one has
        ended, or does not come in time."""
        of_each = {self._number: rows}
        for other, sock in self._sockets.items():
            try:
                sock.sendall(_ROWS.pack(rows))
            except OSError:
                self._lose(other)
        for other, sock in self._sockets.items():
            try:
                data = sock.recv(_ROWS.size, socket.MSG_WAITALL)
            except TimeoutError:
                raise RuntimeError(f"core {other} did not come to a step within {self._timeout:g} s") from None
            except OSError:
                data = b""
            if len(data) < _ROWS.size:
                self._lose(other)
            (of_each[other],) = _ROWS.unpack(data)
        counts = [of_each[number] for number in sorted(of_each)]
        self._is_awake = any(counts)
        return counts

    def _lose(self, other: int) -> None:
        time.sleep(_LAST_WORDS)
        raise RuntimeError(f"core {other}, which has some of the experts, has ended")
