"""The server that the pages of this project and of others are tried on."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server on the embedded model."""
    log = tmp_path_factory.mktemp("docs") / "log"
    command = [sys.executable, "-m", "octavo.cli.main", "serve", "--host", "127.0.0.1", "--port", "0"]
    with log.open("wb") as out, subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out) as process:
        try:
            deadline = time.monotonic() + 300
            while (found := re.search(r"serving .* at (http\S+)", log.read_text())) is None:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield found[1]
        finally:
            process.kill()
