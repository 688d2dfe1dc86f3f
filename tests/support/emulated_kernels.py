"""The CPU kernels for 64-bit ARM in an emulator: a `Library` whose operations run in a process of their own.

Needs a cross compiler (zig, as the package ziglang has it, or aarch64-linux-gnu-gcc) and qemu's user emulator.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
from bisect import bisect_right
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import emulated_amx

from octavo_kernels.cpu import compiler, library

DRIVER = Path(__file__).with_suffix(".c")
ARM64 = "aarch64"
ISAS = compiler.all_isas(ARM64)  # with matrix instructions, the dot product, neither


def cross_compiler() -> list[str] | None:
    """The command that makes static programs for 64-bit ARM; None without one."""
    if found := shutil.which("aarch64-linux-gnu-gcc"):
        return [found, "-static"]
    zig = [shutil.which("zig")] if shutil.which("zig") else [sys.executable, "-m", "ziglang"]
    if zig[0] != sys.executable or find_spec("ziglang"):
        return [*zig, "cc", "-target", "aarch64-linux-musl", "-static"]
    return None


def emulator() -> str | None:
    """qemu's, for programs of 64-bit ARM; None without one."""
    return shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


def missing() -> str | None:
    """What is not here of what running them needs; None: nothing."""
    if cross_compiler() is None:
        return "no compiler for 64-bit ARM (pip install ziglang)"
    return None if emulator() else "no emulator of 64-bit ARM (apt-get install qemu-user-static)"


def compile_for_arm64(isa: str, target: Path) -> subprocess.CompletedProcess[str]:
    """Compile the kernels with the flags of ``isa``, and the driver, to the program ``target``."""
    command = cross_compiler()
    assert command is not None
    flags = [flag for flag in compiler.flags(isa, ARM64) if flag != "-shared"]
    if "cc" in command:  # zig names processors, not versions of the architecture
        flags = [re.sub(r"^-march=[\w.-]*", "-mcpu=generic", flag) for flag in flags]
    sources = [str(path) for path in (*sorted(compiler.SOURCES.glob("*.c")), DRIVER)]
    return subprocess.run(
        [*command, *flags, "-Wno-unused-command-line-argument", *sources, "-lm", "-o", str(target)],
        capture_output=True,
        text=True,
        timeout=600,
    )


class EmulatedLibrary(library.Library):
    """See `library.Library`: one thread, and no memory that is shared while an operation runs."""

    def __init__(self, path: Path, isa: str) -> None:
        self.path, self.isa, self.recorder = path, isa, None
        self._packers = library.packers()
        command = [emulator(), str(path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def _run(self, program: bytes | int, words: int, threads: int) -> int:
        """Like oct_run: 0, or 1 + where the first malformed operation is."""
        raw = program if isinstance(program, bytes) else ctypes.string_at(program, words * 8)
        numbers = np.frombuffer(raw, np.int64)
        flags = np.zeros(words, np.uint8)
        at = 0
        while at < words:
            flags[[at + 2 + i for i in library.ADDRESSES[int(numbers[at])]]] = 1
            at += 2 + int(numbers[at + 1])
        regions = _regions_of([int(address) for address in numbers[flags == 1] if address])
        head = np.array([words, len(regions)], np.int64).tobytes()
        self._write(head + raw + flags.tobytes() + np.array(regions, np.int64).tobytes())
        while True:
            first, second = map(int, np.frombuffer(self._read(16), np.int64))
            if second > 0:
                self._write(ctypes.string_at(first, second))
            elif second < 0:
                now, changed = (np.frombuffer(self._read(-second), np.uint8) for _ in range(2))
                memory = np.frombuffer((ctypes.c_uint8 * -second).from_address(first), np.uint8)
                np.copyto(memory, now, where=changed.view(bool))
            else:
                break
        return first

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._process.stdin.write(left) :]

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._process.stdout.read(count - len(data))
            if not more:
                raise RuntimeError(f"the emulated kernels ended with exit code {self._process.wait()}")
            data += more
        return data


def _regions_of(addresses: list[int]) -> list[tuple[int, int]]:
    """(start, length) of the mapped memory that they are in, neighbours together."""
    found: list[list[int]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions = line.split()[:2]
        start, end = (int(number, 16) for number in span.split("-"))
        if permissions[0] != "r":
            continue
        if found and found[-1][1] == start:
            found[-1][1] = end
        else:
            found.append([start, end])
    starts = [start for start, _ in found]
    wanted = {bisect_right(starts, address) - 1 for address in addresses}
    return [(found[i][0], found[i][1] - found[i][0]) for i in sorted(wanted)]


def all_parameters() -> list[Any]:
    """For `pytest.mark.parametrize`: the instruction sets that this machine runs, and those that it can emulate."""
    emulated = [] if missing() else [pytest.param(f"{ARM64}-{isa}", marks=pytest.mark.slow) for isa in ISAS]
    return [*compiler.supported_isas(), *emulated_amx.names(), *emulated]


@cache
def load(name: str) -> library.Library:
    """One of the emulated ones, compiled if need be (which takes a minute) and started."""
    if name == emulated_amx.NAME:
        return emulated_amx.load()
    isa = name.removeprefix(f"{ARM64}-")
    digest = hashlib.sha256(DRIVER.read_bytes() + compiler.source_hash(ARM64).encode()).hexdigest()[:12]
    target = compiler.LIBRARIES / f"emulated-{isa}-{digest}"
    with (compiler.LIBRARIES / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            done = compile_for_arm64(isa, target.with_suffix(".part"))
            assert done.returncode == 0, done.stderr[-2000:]
            target.with_suffix(".part").rename(target)
    return EmulatedLibrary(target, isa)
