"""A temporary folder that is full is told in a sentence, never by a signal."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octavo.engine.block_map import create_block_map, read_block_map
from octavo.errors import OctavoError
from octavo.system.heartbeat import MAX_PAGES, SIZE, Heartbeat
from octavo.system.temporary import allocate, temporary_file, temporary_folder


def mounted(folder: Path, num_bytes: int) -> Callable[[], None]:
    """Make ``folder`` a file system of that size, or skip; what undoes that."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us mount a small disk")

    def unmount() -> None:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)

    return unmount


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder, with room for the heartbeats and one page more."""
    unmount = mounted(tmp_path, (MAX_PAGES + 1) * SIZE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    unmount()


def test_a_page_that_is_mapped_has_room(small: Path) -> None:
    with temporary_file() as file:
        Heartbeat(file.fileno(), create=True).beat()
        blocks = create_block_map(file.fileno(), SIZE)
        blocks[:] = b"x" * SIZE
        assert read_block_map(file.fileno()) == b"x" * SIZE
        with pytest.raises(OctavoError, match=rf"{small}.*No space left.*TMPDIR"):
            create_block_map(file.fileno(), SIZE + 1)
        with temporary_file() as other, pytest.raises(OctavoError, match=rf"{small}.*No space left.*TMPDIR"):
            Heartbeat(other.fileno(), create=True)


def test_allocating_keeps_what_is_there_and_never_shortens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for system in ("with fallocate", "without"):
        with tempfile.TemporaryFile() as file:
            file.write(b"abc")
            file.flush()
            allocate(file.fileno(), 9000)
            allocate(file.fileno(), 10)
            with mmap.mmap(file.fileno(), 0) as memory:
                assert bytes(memory) == b"abc".ljust(9000, b"\0"), system
        monkeypatch.delattr(os, "posix_fallocate", raising=False)


def test_no_temporary_folder_at_all_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/none/such"])
    for make in (temporary_file, lambda: temporary_folder("octavo-")):
        with pytest.raises(OctavoError, match=r"No usable temporary directory.*TMPDIR"):
            make()


@pytest.mark.parametrize("how", ["disk", "limit"])
def test_a_server_without_room_for_temporary_files_says_so(how: str, tmp_path: Path) -> None:
    unmount = mounted(tmp_path, 8192) if how == "disk" else lambda: None
    try:
        done = subprocess.run(
            [sys.executable, "-m", "octavo.cli.main", "serve", "--port", "0"],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            preexec_fn=None if how == "disk" else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)),
        )
    finally:
        unmount()
    assert done.returncode == 1
    assert done.stderr.startswith(f"octavo: error: the temporary folder, {tmp_path}, cannot be used"), done.stderr
    assert done.stderr.count("\n") == 1 and "TMPDIR" in done.stderr
