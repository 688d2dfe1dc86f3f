"""Starts the other ranks of an engine as child processes. Imports little: their own imports take longest, so they are
started first."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.executor.ranks import Ranks
from octavo.system import limits
from octavo.system.channel import Channel
from octavo.system.heartbeat import MAX_PAGES, Heartbeat
from octavo.system.logging_setup import logging_options
from octavo.system.parent import describe_exit

if TYPE_CHECKING:
    from octavo.executor.places import Place
    from octavo.interface.engine_config import EngineConfig


@dataclass
class RankProcess:
    """One of them; see `octavo.executor.ranks.Rank`."""

    number: int
    process: subprocess.Popen[bytes]
    socket: socket.socket
    channel: Channel
    heartbeat: Heartbeat

    @property
    def name(self) -> str:
        """As errors call it."""
        return f"rank {self.number} (process {self.process.pid})"

    def ended(self) -> tuple[int, str] | None:
        """See `Rank`: one that was killed is the reason of the others' ends."""
        code = self.process.poll()
        return None if code is None else (code, self.heartbeat.failure or f"{self.name} {describe_exit(code)}")

    def end(self) -> None:
        """Kill it, which works on a stopped process too."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """See `Rank`."""
        self.end()
        self.socket.close()
        if self.process.stdin is not None:
            try:
                self.process.stdin.close()
            except OSError:
                pass


class RankProcesses(Ranks):
    """``python -m octavo.executor.worker_proc RANK SOCKET HEARTBEATS`` each.

    They read one line of JSON from their stdin and end when stdin does, or this process, or, on Linux, the thread here
    that has started them.
    """

    def __init__(self, size: int, heartbeats: int | None = None) -> None:
        """``heartbeats``: the file of heartbeats, of which rank 0 has the first (None: a new one)."""
        if not 1 < size <= MAX_PAGES:
            raise ValueError(f"size: 2 to {MAX_PAGES} ranks, not {size}")
        super().__init__(size)
        self._heartbeats = heartbeats
        self._processes: list[RankProcess] = []
        self._start_thread()

    def _start(self) -> None:
        if self._heartbeats is not None:
            return self._start_processes(self._heartbeats)
        with tempfile.TemporaryFile() as file:
            Heartbeat(file.fileno(), create=True)
            return self._start_processes(file.fileno())

    def _start_processes(self, heartbeats: int) -> None:
        for number in range(1, self.size):
            ours, theirs = socket.socketpair()
            with theirs:
                inherited = theirs.fileno(), heartbeats
                command = [sys.executable, "-m", "octavo.executor.worker_proc", str(number), *map(str, inherited)]
                # A group of its own: Ctrl-C in a terminal reaches the front end alone, which then drains.
                process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0, pass_fds=inherited)
            page = Heartbeat(heartbeats, create=False, rank=number)
            self._processes.append(RankProcess(number, process, ours, Channel(ours), page))
            self._ranks.append(self._processes[-1])

    def open_place(self, config: EngineConfig) -> Place:
        """See `Ranks`: memory that they have mapped."""
        from octavo.executor.places import create_memory, local_place

        own, *others = create_memory(config.parallel, has_cores=limits.cpu_count() >= self.size)
        line = json.dumps({"config": config.to_dict(), **logging_options()}).encode() + b"\n"
        for rank, descriptors in zip(self._processes, others, strict=True):
            assert rank.process.stdin is not None
            try:
                socket.send_fds(rank.socket, [b"f"], descriptors)
                rank.process.stdin.write(line)
                rank.process.stdin.flush()
            except OSError:  # it has ended already, as will be noticed
                pass
            for descriptor in descriptors:
                os.close(descriptor)
        return local_place(config.parallel, 0, own)
