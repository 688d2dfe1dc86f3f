"""A disk without room gives one line that says which folder and what to set, and leaves nothing broken behind."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fetch_process import run_fetch
from support.gguf_files import write_gguf
from support.hub_server import BIG, Hub
from support.tiny_models import FAMILIES, make_model


@pytest.fixture(params=["disk", "limit"])
def little_room(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A folder with 400 kB of room and the largest size of a file in it (0: as much as fits).

    A real small disk where this machine lets us mount one, and a process that may write no more than that.
    """
    folder = tmp_path / "small"
    folder.mkdir()
    if request.param == "limit":
        yield folder, 400_000
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us mount a small disk")
    yield folder, 0
    subprocess.run(["umount", str(folder)], check=True)


def one_clear_line(err: str) -> bool:
    return err.startswith("octavo: error: ") and err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize("size_known", [True, False], ids=["asked before", "found out"])
def test_fetching_from_a_hub(
    size_known: bool, hub: Hub, little_room: tuple[Path, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, limit = little_room
    monkeypatch.setenv("HF_HOME", str(folder))
    hub.hide_sizes = not size_known
    code, out, err = run_fetch("org/model", "--quiet", file_limit=limit)
    assert (code, out) == (1, "")
    assert one_clear_line(err), err
    assert str(folder) in err and "HF_HOME" in err
    assert "room" in err or "no space left" in err
    # With room again, what is there is good to go on from.
    bigger = tmp_path / "bigger"
    os.system(f"cp -r {folder} {bigger}")
    monkeypatch.setenv("HF_HOME", str(bigger))
    code, out, err = run_fetch("org/model", "--quiet")
    assert (code, err) == (0, "")
    assert Path(out.strip()).read_bytes() == BIG


def test_deriving_from_a_gguf_file(
    little_room: tuple[Path, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, limit = little_room
    write_gguf(tmp_path / "m.gguf", make_model(*FAMILIES["llama"]), arch="llama")
    monkeypatch.setenv("OCTAVO_CACHE", str(folder))
    if limit:
        limit = 2_000  # the tokenizer of this small model is larger than that
    else:
        (folder / "filler").write_bytes(b"x" * (396 << 10))
    code, _, err = run_fetch(str(tmp_path / "m.gguf"), file_limit=limit)
    assert code == 1
    assert one_clear_line(err) and "no space left" in err and "OCTAVO_CACHE" in err, err
    (folder / "filler").unlink(missing_ok=True)
    assert run_fetch(str(tmp_path / "m.gguf"))[0] == 0


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    code, _, err = run_fetch("org/model", "--quiet")
    assert code == 1
    assert one_clear_line(err) and "cannot write to" in err and "--download-dir" in err, err
