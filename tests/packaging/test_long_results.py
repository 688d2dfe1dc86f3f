"""What is written about `make test-long` can be read: which commit, when, how many of what."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path

import long
import pytest

COUNTS = {"passed", "failed", "skipped", "seconds", "exit_status"}


def test_the_last_results_are_well_formed() -> None:
    results = json.loads(long.RESULTS.read_text())
    assert results and results.keys() <= long.PARTS.keys()
    for part, result in results.items():
        assert result.keys() == {*COUNTS, "commit", "clean", "date"}, part
        assert re.fullmatch(r"[0-9a-f]{40}", result["commit"])
        assert datetime.fromisoformat(result["date"]).tzinfo is not None
        assert isinstance(result["clean"], bool)
        assert all(isinstance(result[name], int) and result[name] >= 0 for name in COUNTS)
        assert result["passed"] + result["failed"] > 0 and (result["failed"] == 0 or result["exit_status"])


def test_a_part_that_fails_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_it.py").write_text("def test_a(): assert 0\ndef test_b(): pass\n")
    one = ["-m", "pytest", "-p", "no:cacheprovider", "-q", f"{long.SCRATCH}/test_it.py"]
    monkeypatch.setattr(long, "PARTS", {"pytest": one, "program": ["-c", "raise SystemExit(3)"], "last": ["-c", ""]})
    monkeypatch.setattr(long, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(long.tempfile, "TemporaryDirectory", lambda: _Folder(tmp_path))
    assert long.main([]) == 1
    results = json.loads((tmp_path / "results.json").read_text())
    counts = {name: [result[kind] for kind in ("passed", "failed", "exit_status")] for name, result in results.items()}
    assert counts == {"pytest": [1, 1, 1], "program": [0, 1, 3], "last": [1, 0, 0]}
    assert long.main(["program"]) == 1
    assert list(json.loads((tmp_path / "results.json").read_text())) == ["pytest", "program", "last"]
    assert long.main(["nothing"]) == 2


class _Folder:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> str:
        return str(self._path)

    def __exit__(self, *_: object) -> None:
        pass
