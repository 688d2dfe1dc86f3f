"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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
