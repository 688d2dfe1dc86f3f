"""Limits of this process: CPUs by affinity and cgroup quota, memory by cgroup limit (v1 and v2)."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

_CGROUP = Path("/sys/fs/cgroup")
_MAX_DESCRIPTORS = 65_535
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def _read_numbers(path: Path) -> list[int] | None:
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return None


def _own_cgroups(controller: str, root: Path = _CGROUP, proc: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """The cgroup directories that bound this process, innermost first."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root if (root / "cgroup.controllers").exists() else root / "unified"
        elif controller in controllers.split(","):
            base = root / controllers if (root / controllers).exists() else root / controller
        else:
            continue
        here = base / path.lstrip("/")
        found += [here, *[p for p in here.parents if p.is_relative_to(base)]]
    return found


def cpu_count(root: Path = _CGROUP, proc: Path = Path("/proc/self/cgroup")) -> int:
    """CPUs to keep busy: at most the affinity mask, the smallest quota (rounded up) and OMP_NUM_THREADS; at least 1."""
    count = float(len(os.sched_getaffinity(0)))
    for cgroup in _own_cgroups("cpu", root, proc):
        try:
            quota, period = (cgroup / "cpu.max").read_text().split()
        except (OSError, ValueError):
            v1_quota, v1_period = (_read_numbers(cgroup / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
            if v1_quota and v1_period and v1_quota[0] > 0:
                count = min(count, v1_quota[0] / v1_period[0])
            continue
        if quota != "max":
            count = min(count, int(quota) / int(period))
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        count = min(count, int(wanted))
    return max(1, math.ceil(count))


def memory_limit(root: Path = _CGROUP, proc: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes of host memory that this process can have: the machine's, or the smallest cgroup limit above it."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for cgroup in _own_cgroups("memory", root, proc):
        for name in ("memory.max", "memory.limit_in_bytes"):
            numbers = _read_numbers(cgroup / name)
            if numbers and numbers[0] > 0:
                limit = min(limit, numbers[0])
    return limit


def has_matrix_units(info: Path = Path("/proc/cpuinfo")) -> bool:
    """True if this CPU has matrix units (AMX), the system permits them (the permission is requested, as the kernels
    do), and OCTAVO_CPU_ISA names no kernels without them.
    """
    if os.environ.get("OCTAVO_CPU_ISA") not in (None, "", "amx"):
        return False
    try:
        shown = {"amx_tile", "amx_int8", "amx_bf16"} <= set(info.read_text().split())
    except OSError:
        return False
    return shown and kernel_compiler().amx_refusal() is None


@cache
def kernel_compiler() -> ModuleType:
    """The module `octavo_kernels.cpu.compiler`, loaded by its path: its package imports torch. Nothing is compiled."""
    package = importlib.util.find_spec("octavo_kernels")
    assert package is not None and package.submodule_search_locations
    path = Path(package.submodule_search_locations[0]) / "cpu" / "compiler.py"
    spec = importlib.util.spec_from_file_location("kernel_compiler", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def allow_many_descriptors() -> None:
    """Raise the limit of file descriptors, of this process and those that it starts: with the usual 1,024, that many
    slow clients would lock out all others, and the probes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_MAX_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def large_memory_returned() -> Iterator[None]:
    """Return freed memory of 4 MiB or more to the system at once, and nothing smaller. Otherwise glibc raises its limit
    when it sees such sizes, puts long-lived and short-lived memory side by side, and keeps the holes; and a buffer that
    is freed and wanted again would be faulted in anew, page by page."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, 4 << 20)
    mallopt(_M_TRIM_THRESHOLD, 64 << 20)
    try:
        yield
    finally:  # the most that it accepts: steps use the same sizes again
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)


def trim_memory() -> None:
    """Give memory that was freed back to the system: glibc keeps what small objects and several threads leave."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # another C library
        pass
