"""Compile the C kernels: one small shared library for each instruction set, cached by a hash of the sources.

Needs a C compiler (``CC``, else cc, gcc or clang), but neither Python headers nor OpenMP. Imports the standard library
only, so that `make setup`, the wheel's build hook and the images can run ``python compiler.py [--all]`` first.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing.pool import ThreadPool
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
LIBRARIES = Path(__file__).parent / "lib"

_FLAGS = "-O3 -std=gnu11 -fPIC -shared -fvisibility=hidden -fno-math-errno -fno-trapping-math -ffp-contract=off"

_AVX512BF16 = "-march=x86-64-v4 -mavx512vnni -mavx512bf16"
_AVX512BF16_NEEDS = frozenset(
    {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512_vnni", "avx512_bf16", "fma", "f16c"}
)

# Of a core of 2.1 GHz: one library, and its longest file, which no second core shortens.
_SECONDS, _LONGEST_FILE = 100, 50
_EVERY = 5.0  # seconds between lines that say how far it is

AMX = "amx"  # the one that the system must permit as well

# Best first: the first one whose CPU flags (as in /proc/cpuinfo) are all present is used.
_TARGETS: dict[str, dict[str, tuple[str, frozenset[str]]]] = {
    "x86_64": {
        AMX: (
            f"{_AVX512BF16} -mamx-tile -mamx-int8 -mamx-bf16",
            _AVX512BF16_NEEDS | {"amx_tile", "amx_int8", "amx_bf16"},
        ),
        "avx512bf16": (_AVX512BF16, _AVX512BF16_NEEDS),
        "avx512": (
            "-march=x86-64-v4 -mavx512vnni",
            frozenset(
                {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512_vnni", "avx2", "fma", "f16c"}
            ),
        ),
        "avxvnni": ("-march=x86-64-v3 -mavxvnni", frozenset({"avx2", "avx_vnni", "fma", "f16c", "bmi2"})),
        # Of 16 registers, GCC spends too many where it moves expressions to their uses (ter): 4-bit products lose 15 %.
        "avx2": ("-march=x86-64-v3 -fno-tree-ter", frozenset({"avx2", "fma", "f16c", "bmi2"})),
        "baseline": ("-march=x86-64-v2", frozenset({"ssse3", "sse4_1"})),
    },
    "aarch64": {
        # The matrix instructions of both: Graviton 3, Ampere One, Axion, Apple's M2 and newer.
        "i8mm": ("-march=armv8.2-a+dotprod+i8mm+bf16", frozenset({"asimddp", "i8mm", "bf16"})),
        "dotprod": ("-march=armv8.2-a+dotprod", frozenset({"asimddp"})),
        "baseline": ("-march=armv8-a", frozenset()),
    },
}


class BuildError(RuntimeError):
    """The kernels cannot be compiled on this machine; the message is one line and says what to do."""


def machine() -> str:
    """The architecture of this machine: x86_64, aarch64, or its own name."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def all_isas(architecture: str | None = None) -> list[str]:
    """The instruction sets that can be compiled for an architecture (None: this one), best first; may be empty."""
    return list(_TARGETS.get(architecture or machine(), {}))


def flags(isa: str, architecture: str | None = None) -> list[str]:
    """The compiler's, for an instruction set of an architecture (None: this one)."""
    return [*_FLAGS.split(), *_TARGETS[architecture or machine()][isa][0].split()]


def supported_isas() -> list[str]:
    """Return those of `all_isas` that this CPU has and the system permits, best first; requests that permission."""
    isas = _isas_of_cpu()
    return [isa for isa in isas if isa != AMX or _refusal() is None]


def amx_refusal() -> str | None:
    """Return why the system does not permit this process to use the CPU's matrix tiles; None if it may or has none.

    The permission holds for the process, with all of its threads, and is inherited by its children.
    """
    return _refusal() if AMX in _isas_of_cpu() else None


def _isas_of_cpu() -> list[str]:
    flags = _cpu_flags()
    return [isa for isa, (_, needed) in _TARGETS.get(machine(), {}).items() if needed <= flags]


# arch_prctl of Linux on x86_64; what it is asked: which states it manages, and a permission; the state of tiles
_ARCH_PRCTL, _GET_SUPPORTED, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1021, 0x1023, 18


def _refusal() -> str | None:
    features = ctypes.c_ulong()
    if error := _arch_prctl(_GET_SUPPORTED, ctypes.addressof(features)):
        return f"the system does not say that it manages them ({os.strerror(error)})"
    if not features.value >> _TILE_DATA & 1:
        return "the system does not manage them"
    if error := _arch_prctl(_REQUEST_PERMISSION, _TILE_DATA):
        return f"the system does not permit them ({os.strerror(error)})"
    return None


def _arch_prctl(code: int, argument: int) -> int:
    """The system call; returns 0 or its error."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    failed = call(ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(code), ctypes.c_ulong(argument))
    return ctypes.get_errno() if failed else 0


def _cpu_flags() -> frozenset[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    # No /proc: macOS answers by name, under which Linux has other words; nothing is known of others.
    return _flags_of_mac() if machine() == "aarch64" and sys.platform == "darwin" else frozenset()


def _flags_of_mac() -> frozenset[str]:
    """Every arm64 Mac has the dot product; the system says what else it has."""
    asked = {"i8mm": b"hw.optional.arm.FEAT_I8MM", "bf16": b"hw.optional.arm.FEAT_BF16"}
    return frozenset({"asimddp"} | {flag for flag, name in asked.items() if _sysctl(name)})


def _sysctl(name: bytes) -> int:
    """An integer that the system (macOS) has under ``name``; 0 if it has none."""
    value = ctypes.c_int()
    size = ctypes.c_size_t(ctypes.sizeof(value))
    failed = ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return 0 if failed else value.value


def source_hash(architecture: str | None = None) -> str:
    """Twelve digits that change with any source file or compiler flag of an architecture (None: this one)."""
    march = [(isa, flags) for isa, (flags, _) in sorted(_TARGETS.get(architecture or machine(), {}).items())]
    digest = hashlib.sha256(repr((_FLAGS, march)).encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def library_name(isa: str) -> str:
    """The file name of the library for ``isa``, which changes with the sources."""
    return f"octavo_cpu-{machine()}-{isa}-{source_hash()}.so"


def find_compiler() -> str | None:
    """The C compiler: $CC, else the first of cc, gcc and clang on the path; None without one."""
    named = os.environ.get("CC")
    if named:
        return named
    return next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


Report = Callable[[str], object]  # takes a line that says how far it is


def build(isa: str, directory: Path = LIBRARIES, report: Report | None = None) -> Path:
    """Compile for ``isa`` into ``directory`` unless the library exists; returns its path.

    Several processes may do this at once. Raises BuildError if there is no compiler, if it fails, or if the directory
    cannot be written.
    """
    return build_several([isa], directory, report)[0]


def build_several(isas: Iterable[str], directory: Path = LIBRARIES, report: Report | None = None) -> list[Path]:
    """The libraries for several instruction sets; all files of all of them are compiled in parallel.

    An old compiler may not know the newest: raises BuildError only if none could be built.
    """
    targets = {isa: directory / library_name(isa) for isa in isas}
    missing = [isa for isa, target in targets.items() if not target.exists()]
    errors = _build_missing(missing, directory, report or (lambda _: None)) if missing else {}
    built = [target for isa, target in targets.items() if isa not in errors]
    if targets and not built:
        raise next(iter(errors.values()))
    for isa in missing if directory == LIBRARIES else ():  # a cache may serve several versions
        for old in directory.glob(f"octavo_cpu-{machine()}-{isa}-*.so"):
            if isa not in errors and old != targets[isa]:
                old.unlink(missing_ok=True)
    return built


def _build_missing(isas: list[str], directory: Path, report: Report) -> dict[str, BuildError]:
    """Returns why some could not be built, in their order."""
    compiler = find_compiler()
    if compiler is None:
        raise BuildError(
            "no C compiler found (looked for $CC, cc, gcc, clang); install one (apt-get install gcc libc6-dev, "
            "dnf install gcc, apk add gcc musl-dev) and start again, or install a wheel that has the kernels in it"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(suffix=".tmp", dir=directory)
    except OSError as error:
        raise BuildError(f"cannot write {directory}: {error.strerror}") from error
    with folder as path:
        errors = _compile(compiler, isas, Path(path), report)
        for isa in isas:
            if isa in errors:
                continue
            try:
                library = Path(path) / f"{isa}.so"
                _run(compiler, isa, [str(_object(Path(path), isa, file)) for file in _files()], library)
                os.chmod(library, 0o755)
                os.replace(library, directory / library_name(isa))
            except BuildError as error:
                errors[isa] = error
    return {isa: errors[isa] for isa in isas if isa in errors}


def _compile(compiler: str, isas: list[str], folder: Path, report: Report) -> dict[str, BuildError]:
    """Every file of every instruction set, the longest first: what is left at the end is short."""
    jobs = [(isa, file) for file in _files() for isa in isas]
    threads, started = _threads(), time.monotonic()
    seconds = max(_LONGEST_FILE, _SECONDS * len(isas) / threads)
    what = f"compiling the CPU kernels for {', '.join(isas)}"
    report(f"{what}: {len(jobs)} files, once; about {seconds:.0f} s with {threads} idle core{'s' * (threads > 1)}")
    errors: dict[str, BuildError] = {}
    done: list[Path] = []

    def one(job: tuple[str, Path]) -> None:
        isa, file = job
        try:
            if isa not in errors:
                _run(compiler, isa, ["-c", str(file)], _object(folder, isa, file))
                done.append(file)
        except BuildError as error:
            errors.setdefault(isa, error)

    with ThreadPool(threads) as pool:
        running = pool.map_async(one, jobs, chunksize=1)
        while not running.ready():
            running.wait(_EVERY)
            report(f"{what}: {len(done)} of {len(jobs)} files, {time.monotonic() - started:.0f} s")
        running.get()
    return errors


def _run(compiler: str, isa: str, arguments: list[str], output: Path) -> None:
    """Compile or link ``arguments`` into ``output``. Raises BuildError."""
    libraries = [] if "-c" in arguments else ["-lm"]
    command = [*shlex.split(compiler), *flags(isa), *arguments, *libraries, "-o", str(output)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"cannot run the C compiler {compiler!r}: {error}") from error
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
        raise BuildError(f"{compiler} failed for {isa}: {lines[0] if lines else f'exit code {result.returncode}'}")


def _files() -> list[Path]:
    """The C files, those that take longest first."""
    return sorted(SOURCES.glob("*.c"), key=lambda file: (-file.stat().st_size, file.name))


def _object(folder: Path, isa: str, file: Path) -> Path:
    return folder / f"{isa}-{file.stem}.o"


def _threads() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> int:
    """The command ``python compiler.py [--all]``; returns the exit status."""
    parser = argparse.ArgumentParser(description="Compile the CPU kernels.")
    parser.add_argument(
        "--all", action="store_true", help="every instruction set of this architecture, not only this CPU's"
    )
    isas = all_isas() if parser.parse_args().all else supported_isas()[:1]
    if not isas:
        print(f"There are no CPU kernels for {machine()}: plain torch will be used, which is slower.")
    try:
        for library in build_several(isas, report=lambda line: print(line, file=sys.stderr, flush=True)):
            print(library)
    except BuildError as error:
        # A machine without a compiler can still be set up.
        print(f"CPU kernels not built: {error}. Plain torch takes their place: about 50 times slower.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
