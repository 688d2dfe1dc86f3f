"""Threads and memory follow the cgroup and the affinity mask, not the host."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.system import limits


@pytest.fixture(autouse=True)
def _no_omp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_version_2_takes_the_smallest_limit_on_the_way_up(tmp_path: Path) -> None:
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    write(proc, "0::/pods/pod/container\n")
    write(root / "cgroup.controllers", "cpu memory")
    write(root / "pods" / "cpu.max", "250000 100000")
    write(root / "pods" / "pod" / "container" / "cpu.max", "max 100000")
    write(root / "pods" / "pod" / "memory.max", str(1 << 30))
    write(root / "pods" / "pod" / "container" / "memory.max", "max")
    assert limits.cpu_count(root, proc) == 3
    assert limits.memory_limit(root, proc) == 1 << 30


def test_version_1(tmp_path: Path) -> None:
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    write(proc, "5:cpu,cpuacct:/kubepods/x\n4:memory:/kubepods/x\n0::/\n")
    write(root / "cpu,cpuacct" / "kubepods" / "x" / "cpu.cfs_quota_us", "50000")
    write(root / "cpu,cpuacct" / "kubepods" / "x" / "cpu.cfs_period_us", "100000")
    write(root / "memory" / "kubepods" / "x" / "memory.limit_in_bytes", str(512 << 20))
    assert limits.cpu_count(root, proc) == 1
    assert limits.memory_limit(root, proc) == 512 << 20


def test_the_affinity_mask_and_the_machine_count_without_limits(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    write(proc, "0::/\n")
    assert limits.cpu_count(tmp_path, proc) == 8
    assert limits.memory_limit(tmp_path, proc) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_omp_num_threads_is_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert limits.cpu_count(tmp_path, tmp_path / "none") == 2


@pytest.mark.parametrize("isa, found", [(None, True), ("amx", True), ("avx512bf16", False)])
def test_matrix_units_count_unless_kernels_without_them_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: str | None, found: bool
) -> None:
    monkeypatch.setenv("OCTAVO_CPU_ISA", isa or "")
    monkeypatch.setattr(limits.kernel_compiler(), "_cpu_flags", frozenset)  # nothing to ask the system for
    write(tmp_path / "cpuinfo", "flags\t\t: fpu amx_bf16 avx512f amx_tile amx_int8\n")
    assert limits.has_matrix_units(tmp_path / "cpuinfo") == found
    write(tmp_path / "cpuinfo", "flags\t\t: fpu amx_bf16 avx512f amx_tile\n")
    assert not limits.has_matrix_units(tmp_path / "cpuinfo") and not limits.has_matrix_units(tmp_path / "none")


@pytest.mark.parametrize("answers, found", [({}, True), ({0x1021: 22}, False), ({0x1023: 1}, False)])
def test_matrix_units_count_where_the_system_permits_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[int, int], found: bool
) -> None:
    """An old system does not know the question, and a container's filter of system calls refuses the permission."""
    compiler = limits.kernel_compiler()

    def answer(code: int, argument: int) -> int:
        if code == 0x1021:
            ctypes.c_ulong.from_address(argument).value = 1 << 18
        return answers.get(code, 0)

    monkeypatch.delenv("OCTAVO_CPU_ISA", raising=False)
    monkeypatch.setattr(compiler, "machine", lambda: "x86_64")
    monkeypatch.setattr(compiler, "_cpu_flags", lambda: compiler._TARGETS["x86_64"]["amx"][1])
    monkeypatch.setattr(compiler, "_arch_prctl", answer)
    write(tmp_path / "cpuinfo", "flags\t\t: fpu amx_bf16 avx512f amx_tile amx_int8\n")
    assert limits.has_matrix_units(tmp_path / "cpuinfo") == found


def test_asking_for_matrix_units_imports_no_kernels() -> None:
    """They import torch, which the API's process does without."""
    code = "import sys; from octavo.system import limits; limits.has_matrix_units(); limits.kernel_compiler()"
    ends = "; assert not {'torch', 'numpy', 'octavo_kernels'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code + ends], check=True)
