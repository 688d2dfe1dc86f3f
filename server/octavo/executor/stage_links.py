"""Links that carry a step's states from one pipeline stage to the next: memory that both have mapped, or TLS between
nodes."""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from octavo.executor.tls_channel import TlsChannel
from octavo.system.channel import Channel, Kind
from octavo.worker.stage import StageLink

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_AT, _STATE = struct.Struct("=Q"), struct.Struct("=IIB")  # where they begin; rows, columns, dtype of each
_ALIGNED = 64  # bytes
_FRAME = 16 << 20  # bytes of states in one


class _States:
    """The states of one step as bytes; each begins at a multiple of `_ALIGNED`."""

    def __init__(self, shapes: Sequence[tuple[int, int, int]]) -> None:
        self.shapes = shapes
        sizes = [rows * columns * _DTYPES[dtype].itemsize for rows, columns, dtype in shapes]
        *self._starts, self.nbytes = accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0)

    @classmethod
    def like(cls, states: Sequence[Tensor]) -> _States:
        return cls([(len(state), state.shape[1], _DTYPES.index(state.dtype)) for state in states])

    @classmethod
    def parse(cls, head: bytes | bytearray) -> _States:
        return cls(list(_STATE.iter_unpack(head)))

    def head(self) -> bytes:
        return b"".join(_STATE.pack(*shape) for shape in self.shapes)

    def views(self, memory: Tensor) -> list[Tensor]:
        """Return the states as views of ``memory`` uint8 [nbytes]."""
        found = []
        for start, (rows, columns, dtype) in zip(self._starts, self.shapes, strict=True):
            size = rows * columns * _DTYPES[dtype].itemsize
            found.append(memory[start : start + size].view(_DTYPES[dtype]).view(rows, columns))
        return found


class MemoryLink:
    """One end of a `StageLink` within a machine: a message on a socket tells where in the memory the states are."""

    def __init__(self, sock: socket.socket, descriptor: int, slots: int, other: int) -> None:
        """``descriptor``: of a file without content, which it keeps; ``slots``: steps that are under way at the same
        time; ``other``: the rank at the other end."""
        self._channel, self._file, self._slots, self._other = Channel(sock), descriptor, slots, other
        self._heads: deque[bytearray] = deque()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._first, self._size, self._number = 0, 0, 0  # of the slots in use: where they begin, bytes; steps so far

    def send(self, states: Sequence[Tensor]) -> None:
        """See `StageLink`."""
        layout = _States.like(states)
        if layout.nbytes > self._size:  # others, behind those that may still be read
            self._first += self._slots * self._size
            self._size = 2 * layout.nbytes
            os.ftruncate(self._file, self._first + self._slots * self._size)
            self._map()
        at = self._first + self._number % self._slots * self._size
        self._number += 1
        for ours, theirs in zip(layout.views(self._memory[at:]), states, strict=True):
            ours.copy_(theirs)
        self._channel.send(Kind.TENSOR, _AT.pack(at) + layout.head())

    def receive(self) -> list[Tensor]:
        """See `StageLink`."""
        try:
            while not self._heads:
                self._channel.wait()
                self._heads += [head for _, head in self._channel.receive()]
        except EOFError:
            raise RuntimeError(f"rank {self._other} has ended") from None
        head = self._heads.popleft()
        (at,) = _AT.unpack_from(head)
        layout = _States.parse(head[_AT.size :])
        if at + layout.nbytes > len(self._memory):
            self._map()
        return layout.views(self._memory[at:])

    def _map(self) -> None:
        self._memory = torch.frombuffer(mmap.mmap(self._file, 0), dtype=torch.uint8)


class SpreadLink:
    """Receive for the first rank of a node, and pass everything on to its other ranks."""

    def __init__(self, source: StageLink, others: Sequence[StageLink]) -> None:
        self._source, self._others = source, others

    def send(self, states: Sequence[Tensor]) -> None:
        """See `StageLink`; this end hears alone."""
        raise NotImplementedError

    def receive(self) -> list[Tensor]:
        """See `StageLink`."""
        states = self._source.receive()
        for link in self._others:
            link.send(states)
        return states


class NoLink:
    """A link of a rank that does not send, because another rank has the same states and sends them."""

    def send(self, states: Sequence[Tensor]) -> None:
        """See `StageLink`."""

    def receive(self) -> list[Tensor]:
        """See `StageLink`; this end hears nothing."""
        raise NotImplementedError


def _hand_on(source: TlsChannel, target: TlsChannel, timeout_seconds: float) -> None:
    """Everything, until one of the nodes has ended, as others notice. Nobody else reads ``source`` or writes to
    ``target``; what else they do with these is another thread's."""
    readable = select.poll()
    readable.register(source.fileno(), select.POLLIN)
    try:
        while True:
            for kind, payload in source.receive():
                target.send(kind, bytes(payload))
            if not target.flush(timeout_seconds):
                return
            readable.poll()
    except (EOFError, OSError, ValueError):
        return


class ChannelLink:
    """One end of a `StageLink` between nodes, which are connected with node 0 each: that one hands on what the others
    send."""

    def __init__(
        self, channel: TlsChannel, other: int, timeout_seconds: float, nodes: Sequence[TlsChannel] = ()
    ) -> None:
        """``other``: the rank at the other end; ``nodes``: on node 0, to all others in their order."""
        self._channel, self._other, self._timeout = channel, other, timeout_seconds
        self._frames: deque[bytearray] = deque()
        self._to_hand_on = list(pairwise(nodes))

    def send(self, states: Sequence[Tensor]) -> None:
        """See `StageLink`; waits while the connection takes no more."""
        for pair in self._to_hand_on:  # with the first step: until then all exchange what they agree on
            threading.Thread(target=_hand_on, args=(*pair, self._timeout), name="stage-relay", daemon=True).start()
        self._to_hand_on.clear()
        layout = _States.like(states)
        memory = torch.empty(layout.nbytes, dtype=torch.uint8)
        for ours, theirs in zip(layout.views(memory), states, strict=True):
            ours.copy_(theirs)
        self._channel.send(Kind.TENSOR, layout.head())
        for start in range(0, layout.nbytes, _FRAME):
            self._channel.send(Kind.TENSOR, memory[start : start + _FRAME].numpy().tobytes())
        if not self._channel.flush(self._timeout):
            raise RuntimeError(f"rank {self._other} did not take a step's states within {self._timeout:g} s")

    def receive(self) -> list[Tensor]:
        """See `StageLink`."""
        layout, data = _States.parse(self._next()), bytearray()
        while len(data) < layout.nbytes:
            data += self._next()
        return layout.views(torch.frombuffer(data, dtype=torch.uint8))

    def _next(self) -> bytearray:
        try:
            while not self._frames:
                self._channel.wait()
                self._frames += [frame for _, frame in self._channel.receive()]
        except EOFError as error:
            raise RuntimeError(f"rank {self._other} has ended: {error}") from None
        return self._frames.popleft()
