"""A server as a process: started, waited for, weighed, stopped with all that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from benchmarks.peers.engines import Engine


class ServerError(Exception):
    """The server did not come up or went away; the message ends with its last words."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Server:
    """``with Server(engine) as server``: ready when the block begins, gone when it ends."""

    def __init__(self, engine: Engine, env: dict[str, str] | None = None, timeout: float = 420) -> None:
        self.engine, self.port = engine, free_port()
        # Bytecode is kept, as for anybody who starts a server twice.
        self._env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | engine.env | (env or {})
        self._timeout = timeout
        self.ready_s = 0.0

    def __enter__(self) -> Server:
        self._log = tempfile.NamedTemporaryFile("r")  # as long as the server
        command = [word.replace("{port}", str(self.port)) for word in self.engine.command]
        started = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=self._log.fileno(),
            stderr=self._log.fileno(),
            start_new_session=True,
        )
        try:
            while not self._is_healthy():
                if self._process.poll() is not None:
                    raise ServerError(f"it ended with exit code {self._process.returncode}: {self.last_words()}")
                if time.perf_counter() - started > self._timeout:
                    raise ServerError(f"not ready after {self._timeout:.0f} s: {self.last_words()}")
                time.sleep(0.01)
        except BaseException:
            self.__exit__()
            raise
        self.ready_s = time.perf_counter() - started
        return self

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def __exit__(self, *_: object) -> None:
        tree = self.tree()
        for wanted, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(wanted)
            _, tree = psutil.wait_procs(tree, timeout=patience)
            for process in tree:  # what its parent has left behind
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(wanted)
        self._process.wait()
        self._log.close()

    def tree(self) -> list[psutil.Process]:
        try:
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def last_words(self) -> str:
        lines = [line.strip() for line in Path(self._log.name).read_text(errors="replace").splitlines()]
        return " | ".join([line for line in lines if line][-4:])[-600:]

    def pss_bytes(self) -> int:
        """Proportional set size of all its processes: a page that n processes share counts 1/n for each."""
        total = 0
        for process in self.tree():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        total += int(line.split()[1]) * 1024
        return total

    def cpu_seconds(self) -> float:
        total = 0.0
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total


class Bystanders:
    """How much of the machine's CPU time went to neither the servers nor us: a busy machine measures nothing."""

    def __init__(self, *servers: Server) -> None:
        self._servers = servers
        self._before = self._now()

    def _now(self) -> tuple[float, float, float]:
        times, own = psutil.cpu_times(), os.times()
        idle = times.idle + times.iowait
        ours = own.user + own.system + sum(server.cpu_seconds() for server in self._servers)
        return sum(times[:8]) - idle, sum(times[:8]), ours

    def share(self) -> float:
        """Of all CPUs' time since this object was made."""
        busy, total, ours = (now - then for now, then in zip(self._now(), self._before, strict=True))
        return max(0.0, busy - ours) / total if total else 0.0
