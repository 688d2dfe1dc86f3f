"""Processes that read what strangers sent can compute and do nothing else."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.system.confined import confined_command
from octavo.system.environment import process_environment


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's confinement is Linux's")
def test_a_confined_process_can_compute_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"abc")
    environment = {**process_environment(), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = confined_command("support.confined_tries", str(tmp_path))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    allowed = ("read a file", "fork", "start a thread", "write to memory", "look into itself")
    by_calls = (
        "open a connection",
        "make a socket",
        "start a program",
        "signal another process",
        "signal another process by its thread",
        "attach to another process",
    )
    by_files = ("write a file", "make a file", "make a folder", "remove a file", "look into another process")
    assert found.keys() == {*allowed, *by_calls, *by_files}
    assert all(found[name] == "done" for name in allowed), found
    if "Seccomp:" in Path("/proc/self/status").read_text() and platform.machine() in ("x86_64", "aarch64"):
        assert all(found[name] == "refused" for name in by_calls), found
    if ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) >= 1:  # Landlock's version
        assert all(found[name] == "refused" for name in by_files), found
        assert os.listdir(tmp_path) == ["there"] and (tmp_path / "there").read_bytes() == b"abc"
