"""Runs a module as a process that has given up what it does not need: ``python -m octavo.system.confined MODULE ...``.

For processes that read what strangers sent. Whoever takes one over by a fault in a decoder or a compiler can start no
program, open no connection, write no file, signal or look into no other process. Each of these holds as far as the
kernel has it (seccomp, Landlock); all of it is set before the module is imported, and so before there are threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import runpy
import struct
import sys
from pathlib import Path

_PR_SET_SECCOMP = 22
_FILTER = 2  # SECCOMP_MODE_FILTER
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # instructions of a filter
_ARCHITECTURE, _NUMBER = 4, 0  # where they stand in what a filter reads
_X32 = 0x4000_0000  # from here on: the same calls by other numbers, on x86-64
_MACHINES = {"x86_64": (0xC000_003E, 0), "aarch64": (0xC000_00B7, 1)}  # the kernel's number, the column below
_REFUSED = {  # numbers of system calls on x86-64 and aarch64
    # Programs, connections, other processes.
    "execve": (59, 221),
    "execveat": (322, 281),
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    # Ways around, and parts of the kernel that faults are found in.
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "open_by_handle_at": (304, 265),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}


def refuse_calls() -> None:
    """Forbid this thread, and all that it starts, to start programs, open connections and reach other processes.

    Needs no_new_privs. Has no effect on a kernel or a machine that is unknown.
    """
    if platform.machine() not in _MACHINES:
        return
    code = _program(*_MACHINES[platform.machine()])
    memory = ctypes.create_string_buffer(code, len(code))
    about = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(memory)))
    arguments = [ctypes.c_ulong(value) for value in (_FILTER, ctypes.addressof(about), 0, 0)]
    ctypes.CDLL(None).prctl(_PR_SET_SECCOMP, *arguments)


def _program(architecture: int, column: int) -> bytes:
    """A filter in the kernel's instructions: (operation, jumps if true and if not, operand)."""
    numbers = [numbers[column] for numbers in _REFUSED.values()]
    refuse = len(numbers) + 1  # instructions from the first of those comparisons to the last return
    steps = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 0, refuse + 2, architecture), (_LOAD, 0, 0, _NUMBER)]
    steps.append((_AT_LEAST, refuse, 0, _X32))
    steps += [(_EQUAL, refuse - 1 - at, 0, number) for at, number in enumerate(numbers)]
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


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
