"""Runs a module as a process that has given up what it does not need: ``python -m octavo.system.confined MODULE ...``.

For processes that read what strangers sent. Whoever takes one over by a fault in a decoder or a compiler can start no
program, open no connection, write no file, signal or look into no other process. Each of these holds as far as the
kernel has it (seccomp, Landlock); all of it is set before the module is imported, and so before there are threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import struct
import sys
from pathlib import Path

from octavo.system.call_filter import refuse_calls

_PR_SET_NO_NEW_PRIVS = 38
_CREATE_RULESET, _RESTRICT_SELF = 444, 446  # Landlock's calls, the same everywhere
_VERSION = 1
_CAPABILITY_VERSION, _READS = 0x2008_0522, 0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
_WRITES = 0b1_1111_1111_0010  # of Landlock's rights: write, remove, make
_EXECUTE, _TRUNCATE = 1, 1 << 14


def confined_command(module: str, *words: str) -> list[str]:
    """``module`` with ``words``, as a command of a process that is confined."""
    return [sys.executable, "-m", "octavo.system.confined", module, *words]


def _confine() -> None:
    with contextlib.suppress(OSError):  # where the machine has no memory left, the kernel ends this one first
        Path("/proc/self/oom_score_adj").write_text("1000")
    if sys.platform == "linux":
        _drop_capabilities()
        arguments = map(ctypes.c_ulong, (1, 0, 0, 0))
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, *arguments)  # which the two that follow need
        _restrict_files()
        refuse_calls()


def _drop_capabilities() -> None:
    """Drop root's capabilities except the ones for reading other users' files: with others a process may inspect
    further processes, regardless of Landlock."""
    library = ctypes.CDLL(None)
    head, held = struct.pack("=Ii", _CAPABILITY_VERSION, 0), ctypes.create_string_buffer(24)
    if library.capget(head, held) == 0:
        effective, permitted, _, *_ = struct.unpack("=6I", held.raw)
        library.capset(head, struct.pack("=6I", effective & _READS, permitted & _READS, 0, 0, 0, 0))


def _restrict_files() -> None:
    """Have the kernel refuse to write and to start files, and to look into processes that are not as confined."""
    call = ctypes.CDLL(None).syscall
    version = call(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    if version < 1:
        return
    rights = ctypes.c_uint64(_EXECUTE | _WRITES | (_TRUNCATE if version >= 3 else 0))
    ruleset = call(_CREATE_RULESET, ctypes.byref(rights), ctypes.c_size_t(ctypes.sizeof(rights)), 0)
    if ruleset >= 0:
        call(_RESTRICT_SELF, ruleset, 0)
        os.close(ruleset)


if __name__ == "__main__":
    _confine()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
