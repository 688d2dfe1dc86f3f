"""`octavo fetch` in a process of its own, so that it can be killed, starved of disk or run beside others."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import resource, sys
from octavo.cli.main import main
if limit := int(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
sys.exit(main(["fetch", *sys.argv[2:]]))
"""


def start_fetch(*arguments: str, file_limit: int = 0) -> subprocess.Popen[str]:
    """``file_limit``: bytes that any one file may have, as on a disk that is full (0: no limit)."""
    command = [sys.executable, "-c", _SCRIPT, str(file_limit), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_fetch(*arguments: str, file_limit: int = 0) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    process = start_fetch(*arguments, file_limit=file_limit)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err
