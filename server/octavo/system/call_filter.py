"""A filter of system calls (seccomp), for a process that computes and does nothing else."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

_PR_SET_SECCOMP = 22
_FILTER = 2  # SECCOMP_MODE_FILTER
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # instructions of a filter
_ARCHITECTURE, _NUMBER = 4, 0  # where they stand in what a filter reads
_X32 = 0x4000_0000  # from here on: the same calls by other numbers, on x86-64
_MACHINES = {"x86_64": (0xC000_003E, 0), "aarch64": (0xC000_00B7, 1)}  # the kernel's number, the column below
_REFUSED = {
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
    """Have the kernel refuse this thread, and all that it starts, to start programs, to make connections, and to reach
    other processes. Only after no_new_privs; without effect where the kernel or the machine is unknown."""
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
