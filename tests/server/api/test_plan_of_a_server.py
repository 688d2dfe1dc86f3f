"""A plan beside a live server: the same KV cache, and a speed that is measured."""

from __future__ import annotations

import json

from octavo.bench import calibrate
from octavo.cli.main import main


def test_a_server_has_the_blocks_of_its_plan_and_calibrates_it(
    shared_server, tiny_model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr(calibrate, "SECONDS", 0.5)
    monkeypatch.setattr("octavo.system.limits.cpu_count", lambda *_: 1)
    flags = ["--cpu", "--load-format", "dummy", "--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "32"]
    work = ["--context", "200", "--output", "20", "--users", "2", "--json"]
    assert main(["plan", str(tiny_model), *flags, *work]) == 0
    before = json.loads(capsys.readouterr().out)
    assert before["workload"]["calibrated"] is False and before["workload"]["calibration"] is None
    assert calibrate.server_blocks(shared_server.url) == (before["num_blocks"], before["block_size"])
    assert main(["plan", str(tiny_model), *flags, *work, "--calibrate", shared_server.url]) == 0
    said = capsys.readouterr()
    assert said.err.count("measured ") == 6 and str(tmp_path / "calibration.json") in said.err
    assert "other flags or memory" not in said.err
    assert main(["plan", str(tiny_model), *flags, *work]) == 0
    after = json.loads(capsys.readouterr().out)
    assert after["workload"] == json.loads(said.out)["workload"]
    assert after["workload"]["calibration"] == str(tmp_path / "calibration.json")
    assert main(["plan", str(tiny_model), *flags, *work[:-1]]) == 0
    assert "calibrated: " + str(tmp_path) in capsys.readouterr().out
    assert main(["plan", str(tiny_model), *flags, "--calibrate", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.startswith("octavo: error: no server at http://127.0.0.1:9")
