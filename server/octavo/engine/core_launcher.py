"""Starts the core process. Imports little: the core's own imports take longest, so it is started first."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, combinations
from typing import IO, TYPE_CHECKING, Any

from octavo.executor.tls_channel import TOKEN
from octavo.system.environment import RAY_SECRETS, process_environment
from octavo.system.heartbeat import Heartbeat
from octavo.system.temporary import temporary_file

if TYPE_CHECKING:
    from octavo.engine.args import EngineArgs


@dataclass(frozen=True)
class CoreOptions:
    """Options of the core process besides the engine's configuration."""

    watchdog_seconds: float = 300.0  # without progress while there is work, after which the core ends itself; 0: never
    log_level: str = "info"
    log_format: str = "text"
    name: str = "core"  # in the log


class CoreProcess:
    """The core as a child process: ``python -m octavo.engine.core_proc SOCKET FILES HEARTBEATS RANKS``, which are three
    descriptors that it inherits and the number of ranks, the others of which are its children.

    It reads one line of JSON from its stdin and ends when stdin does, so it cannot outlive its parent.
    """

    def __init__(self, num_ranks: int = 1, nnodes: int = 1, number: int = 0, links: Sequence[int] = ()) -> None:
        """``num_ranks``: on this machine; ``nnodes``: machines that each have as many; ``number`` of this core among
        several, ``links``: descriptors to the others, see `octavo.executor.lock_step.LockStep`."""
        self.socket, theirs = socket.socketpair()  # for a `CoreClient`
        self.files, their_files = socket.socketpair()  # descriptors go over it
        with theirs, their_files, temporary_file() as shared:
            self.shared_fd = os.dup(shared.fileno())  # a page of heartbeats for each rank, then the block map
            self.heartbeat = Heartbeat(self.shared_fd, create=True)
            others = [Heartbeat(self.shared_fd, create=False, rank=rank) for rank in range(1, num_ranks * nnodes)]
            self.heartbeats = [self.heartbeat, *others]  # by rank
            inherited = theirs.fileno(), their_files.fileno(), shared.fileno()
            arguments = *inherited, num_ranks, number, *links
            command = [sys.executable, "-m", "octavo.engine.core_proc", *map(str, arguments)]
            # A group of its own: Ctrl-C in a terminal reaches the front end alone, which then drains.
            pass_fds = *inherited, *links
            secrets = (TOKEN, *RAY_SECRETS) if nnodes > 1 else RAY_SECRETS
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, process_group=0, pass_fds=pass_fds, env=process_environment(*secrets)
            )
        self._stdin: IO[bytes] | None = self.process.stdin
        self._configured = False

    @property
    def pid(self) -> int:
        """The core's process id."""
        return self.process.pid

    def configure(self, config: dict[str, Any], options: CoreOptions) -> None:
        """Send the engine's configuration (`EngineConfig.to_dict`)."""
        line = json.dumps({"config": config, "options": asdict(options)}).encode() + b"\n"
        assert self._stdin is not None
        self._configured = True
        try:
            self._stdin.write(line)
            self._stdin.flush()
        except BrokenPipeError:  # it has ended already, as its exit code will tell
            pass

    def stop(self, grace: float = 5.0) -> int:
        """End the core: close its stdin, and kill it after ``grace`` seconds. Returns its exit code."""
        if not self._configured:  # it only imports as yet, and a refusal of the model should not wait for that
            self.process.kill()
        if self._stdin is not None:
            try:
                self._stdin.close()
            except BrokenPipeError:
                pass
            self._stdin = None
        try:
            code = self.process.wait(grace)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.socket.close()
        self.files.close()
        if self.shared_fd >= 0:
            os.close(self.shared_fd)
            self.shared_fd = -1
        return code


class CoreProcesses:
    """Several cores, each with the whole model, or all of it but experts, as a `CoreProcess`."""

    def __init__(self, count: int, num_ranks: int = 1, linked: bool = False) -> None:
        """``linked``: to one another."""
        self.linked = linked
        links: list[list[socket.socket]] = [[] for _ in range(count)]
        if linked:
            for first, second in combinations(links, 2):
                ours, theirs = socket.socketpair()
                first.append(ours)
                second.append(theirs)
        self.all = [
            CoreProcess(num_ranks, number=number, links=[sock.fileno() for sock in own])
            for number, own in enumerate(links)
        ]
        for sock in chain.from_iterable(links):
            sock.close()

    @property
    def pid(self) -> int:
        """The first core's process id."""
        return self.all[0].pid

    @property
    def heartbeats(self) -> list[Heartbeat]:
        """Heartbeats of all ranks, core by core."""
        return [beat for process in self.all for beat in process.heartbeats]

    def configure(self, config: dict[str, Any], options: CoreOptions) -> None:
        """See `CoreProcess`."""
        for number, process in enumerate(self.all):
            process.configure(config, replace(options, name=f"core {number}"))

    def stop(self, grace: float = 5.0) -> int:
        """End all; returns the first core's exit code."""
        first, *_ = [process.stop(grace) for process in self.all]
        return first


def start_cores(args: EngineArgs) -> CoreProcess | CoreProcesses:
    """The processes of a server's engine."""
    ranks, cores = args.tensor_parallel_size * args.pipeline_parallel_size // args.nnodes, args.data_parallel_size
    if args.distributed_executor_backend == "ray":  # which says where they are
        return CoreProcess(1, ranks * args.nnodes)
    return CoreProcess(ranks, args.nnodes) if cores == 1 else CoreProcesses(cores, ranks, args.enable_expert_parallel)
