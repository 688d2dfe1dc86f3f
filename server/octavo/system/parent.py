"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1
_COMMAND = (
    "import sys; from octavo.system.parent import die_with_parent; die_with_parent(int(sys.argv.pop(1))); "
    "from octavo.cli.main import main; sys.exit(main())"
)


def octavo_command(*words: str) -> list[str]:
    """`octavo` with ``words``, as a command of a process that ends with this one, or with the thread that starts it."""
    return [sys.executable, "-c", _COMMAND, str(os.getpid()), *words]


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent``, or the thread of it that started this one, ends: even if this
    process is stopped or stuck. Without effect where the system is not Linux."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:  # the parent exited before prctl
        os._exit(0)


def read_line_from_stdin() -> bytes:
    """The first line; from then on this process exits when stdin ends, as it does when its parent has ended."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 65536)
        if not chunk:
            os._exit(0)  # the parent gave up before it sent anything
        line += chunk
    threading.Thread(target=_exit_when_stdin_ends, name="parent-watch", daemon=True).start()
    return line


def _exit_when_stdin_ends() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def describe_exit(code: int) -> str:
    """An exit code of subprocess in words."""
    if code == -signal.SIGKILL:
        return "was killed by signal 9 (the kernel does that when memory runs out)"
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
