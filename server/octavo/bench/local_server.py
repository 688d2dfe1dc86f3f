"""`octavo serve` for as long as a benchmark or the dashboard lasts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import OctavoError
from octavo.system.parent import octavo_command

STOP_TIMEOUT = 60.0  # seconds from SIGTERM to SIGKILL


@dataclass(frozen=True)
class LocalServer:
    """A server on a free port of 127.0.0.1."""

    url: str
    started: float  # time.perf_counter() before its process
    log_file: Path

    @property
    def log(self) -> str:
        """Return the log until now."""
        return self.log_file.read_text(errors="replace")


@contextmanager
def local_server(
    flags: Sequence[str], settings: Mapping[str, str] | None = None, given_up: Callable[[], bool] = lambda: False
) -> Iterator[LocalServer]:
    """Healthy at first, stopped at the end, killed if this process or thread is; its log is gone then. ``settings`` are
    added to its environment; ``given_up`` is asked while it starts. Raises OctavoError with the log if it ends before.
    """
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"} | dict(settings or {})
    with tempfile.NamedTemporaryFile("r") as log:
        started = time.perf_counter()
        process = subprocess.Popen(
            octavo_command("serve", "--host", "127.0.0.1", "--port", "0", *flags),
            stdin=subprocess.DEVNULL,
            stdout=log.fileno(),
            stderr=log.fileno(),
            env=env,
        )
        try:
            path = Path(log.name)
            while not ((url := _url(path)) and _is_healthy(url)):
                _check_running(process, path)
                if given_up():
                    raise OctavoError("the server was stopped before it was ready")
                time.sleep(0.005)
            yield LocalServer(url, started, path)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _url(log: Path) -> str | None:
    """Return the server's address, or None until it has printed it."""
    found = re.search(r"(?:listening|serving .*) (?:at|on) (http\S+)", log.read_text(errors="replace"))
    return found[1] if found else None


def _check_running(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.poll() is None:
        return
    lines = log.read_text(errors="replace").splitlines()
    errors = [line.partition("octavo: error: ")[2] for line in lines if line.startswith("octavo: error: ")]
    raise OctavoError(
        errors[-1] if errors else "\n".join([f"the server ended with exit code {process.returncode}:", *lines])
    )


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False
