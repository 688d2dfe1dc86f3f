"""The server that `octavo chat` starts for one conversation, on a Unix socket that only this user reaches."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from octavo.errors import OctavoError
from octavo.system.parent import describe_exit, octavo_command

URL = "http://127.0.0.1"  # a request must name a host, also through a socket
_LAST_MOMENTS = 2.0  # seconds in which a server that has broken a connection may end


class OwnServer:
    """``path``: of its socket, which stays the same when it is started again."""

    def __init__(self, model: str | None, folder: str) -> None:
        self.path = f"{folder}/api"
        words = ["serve", *([model] if model else []), "--uds", self.path, "--log-level", "warning"]
        self._command = octavo_command(*words)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it is ready. Raises OctavoError if it is killed before; exits with its status if it cannot start,
        since it has printed why."""
        Path(self.path).unlink(missing_ok=True)
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, process_group=0)
        with httpx.Client(transport=httpx.HTTPTransport(uds=self.path)) as http:
            while not _is_healthy(http):
                if (code := self._process.poll()) is not None:
                    if code > 0:
                        sys.exit(code)
                    raise OctavoError(f"the server {describe_exit(code)} before it was ready")
                time.sleep(0.05)

    def end(self) -> str | None:
        """Say how it has ended; None while it runs. What has just broken a connection may need a moment to end."""
        assert self._process is not None
        try:
            code = self._process.wait(_LAST_MOMENTS)
        except subprocess.TimeoutExpired:
            return None
        return describe_exit(code)

    def stop(self) -> None:
        """End it, if it runs."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


@contextlib.contextmanager
def own_server(model: str | None) -> Iterator[OwnServer]:
    """A server of ``model``, ready. Raises and exits as `OwnServer.start`."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        server = OwnServer(model, folder)
        try:
            server.start()
            yield server
        finally:
            server.stop()


def _is_healthy(http: httpx.Client) -> bool:
    try:
        return http.get(f"{URL}/health").status_code == 200
    except httpx.HTTPError:
        return False
