"""Starts the other ranks of a machine as child processes. Imports little: their own imports take longest, so they are
started first."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.executor.ranks import Ranks, Watched
from octavo.system import limits
from octavo.system.channel import Channel
from octavo.system.environment import process_environment
from octavo.system.heartbeat import MAX_PAGES, Heartbeat
from octavo.system.logging_setup import logging_options
from octavo.system.parent import describe_exit
from octavo.system.temporary import temporary_file, temporary_folder

if TYPE_CHECKING:
    from octavo.executor.places import Place
    from octavo.interface.engine_config import EngineConfig


logger = logging.getLogger(__name__)

_END_SECONDS = 5.0


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
        """The name in errors."""
        return f"rank {self.number} (process {self.process.pid})"

    @property
    def watched(self) -> list[Watched]:
        """See `Rank`."""
        return [Watched(self.number, self.name, self.heartbeat)]

    def ended(self) -> tuple[int, str] | None:
        """See `Rank`: one that was killed is the reason of the others' ends."""
        code = self.process.poll()
        return None if code is None else (code, self.heartbeat.failure or f"{self.name} {describe_exit(code)}")

    def end(self) -> None:
        """Kill it, which works on a stopped process too."""
        self.process.kill()

    def close(self) -> None:
        """See `Rank`."""
        self.end()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # the kernel does not let go of it, a file system that hangs for one
            logger.warning("%s does not end", self.name)
        self.socket.close()
        if self.process.stdin is not None:
            try:
                self.process.stdin.close()
            except OSError:
                pass


class RankProcesses(Ranks):
    """Processes ``python -m octavo.executor.worker_proc RANK SOCKET HEARTBEATS INDEX``, one for each rank.

    A process reads one line of JSON from its stdin. It ends when its stdin closes, when this process ends or, on Linux,
    when the thread that started it ends.
    """

    def __init__(self, numbers: range, heartbeats: int | None = None) -> None:
        """``numbers``: of the ranks to be started, those after this process's own; ``heartbeats``: the file of this
        machine's heartbeats, of which this process has the first (None: a new one)."""
        if not 0 < len(numbers) < MAX_PAGES:
            raise ValueError(f"numbers: 1 to {MAX_PAGES - 1} ranks, not {len(numbers)}")
        super().__init__(len(numbers) + 1)
        self._heartbeats, self._numbers = heartbeats, numbers
        self.processes: list[RankProcess] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # where ranks on GPUs meet
        self._start_thread()

    def _start(self) -> None:
        if self._heartbeats is not None:
            return self._start_processes(self._heartbeats)
        with temporary_file() as file:
            Heartbeat(file.fileno(), create=True)
            return self._start_processes(file.fileno())

    def _start_processes(self, heartbeats: int) -> None:
        for index, number in enumerate(self._numbers, 1):
            ours, theirs = socket.socketpair()
            with theirs:
                inherited = theirs.fileno(), heartbeats
                command = [sys.executable, "-m", "octavo.executor.worker_proc", *map(str, (number, *inherited, index))]
                # A group of its own: Ctrl-C in a terminal reaches the front end alone, which then drains.
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, process_group=0, pass_fds=inherited, env=process_environment()
                )
            page = Heartbeat(heartbeats, create=False, rank=index)
            self.processes.append(RankProcess(number, process, ours, Channel(ours), page))
            self._ranks.append(self.processes[-1])

    def hand_over(self) -> list[RankProcess]:
        """The processes, which somebody else watches from now on. They end with the thread here all the same."""
        self.is_watching = False
        return self.processes

    def configure(self, config: EngineConfig, shared: Sequence[Sequence[int]] = (), folder: str | None = None) -> None:
        """Tell all what they are to do. ``shared``: descriptors for each, which are closed here; ``folder``: where
        those with GPUs meet instead."""
        line = json.dumps({"config": config.to_dict(), "folder": folder, **logging_options()}).encode() + b"\n"
        for rank, descriptors in zip(self.processes, shared or [()] * len(self.processes), strict=True):
            assert rank.process.stdin is not None
            try:
                if descriptors:
                    socket.send_fds(rank.socket, [b"f"], descriptors)
                rank.process.stdin.write(line)
                rank.process.stdin.flush()
            except OSError:  # it has ended already, as will be noticed
                pass
            for descriptor in descriptors:
                os.close(descriptor)

    def share_memory(self, config: EngineConfig) -> Sequence[int]:
        """`configure` all with memory that they have mapped; returns this process's own descriptors of it."""
        from octavo.executor.places import create_memory

        own, *others = create_memory(config.parallel, has_cores=limits.cpu_count() >= self.size)
        self.configure(config, others)
        return own

    def open_place(self, config: EngineConfig) -> Place:
        """See `Ranks`."""
        from octavo.executor.places import device_place, local_place
        from octavo.worker.device import ranks_have_gpus

        if ranks_have_gpus(config):
            self._folder = temporary_folder("octavo-")
            self.configure(config, folder=self._folder.name)
            return device_place(config, 0, Path(self._folder.name), self.check)
        return local_place(config.parallel, 0, self.share_memory(config))
