"""The comparison of files of weights keeps what it has measured, says what could not be, and serves equal values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.peers import file_report, files, model_files, random_models
from support.paged import load, logits_of

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


ABOUT = {"date": "2026-11-23T12:00:00+00:00", "commit": "abc1234", "quick": False}
Q6_K = model_files.ModelFile("q6_k", "SmolLM2 Q6_K", Path("q6_k.gguf"))


def cell(tok_s: float, **more: Any) -> dict[str, Any]:
    levels = {users: {"tok_s": tok_s, "cpu_ms_token": 2.0, "bystanders": 0.0} for users in ("1", "8", "20")}
    return {"levels": levels, "ready_s": 1.5, "ttft_512_ms": 300.0, "pss_bytes_after": 5e8} | ABOUT | more


def test_each_kind_of_processor_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not run again keeps its figures, date and commit; a program that is gone takes none of them away."""
    path = tmp_path / "files.json"
    for kind in ("Zen 4", "Zen 5"):
        monkeypatch.setattr(files, "cpu_kind", lambda kind=kind: kind)
        results = files.Results(path)
        results.keep(Q6_K, "Octavo", cell(100.0))
        results.keep(Q6_K, "llama.cpp", cell(50.0))
    results = files.Results(path)
    results.keep(Q6_K, "Octavo", cell(120.0, commit="def5678"))
    results.keep(Q6_K, "llama.cpp", ABOUT | {"missing": "llama-server not found"})
    stored = json.loads(path.read_text())["cpus"]
    speed = {kind: {key: c["levels"]["1"]["tok_s"] for key, c in cells.items()} for kind, cells in stored.items()}
    assert speed == {
        "Zen 4": {"q6_k/Octavo": 100.0, "q6_k/llama.cpp": 50.0},
        "Zen 5": {"q6_k/Octavo": 120.0, "q6_k/llama.cpp": 50.0},
    }
    assert {c["commit"] for c in stored["Zen 4"].values()} == {"abc1234"}
    page = file_report.markdown({"cpus": stored})
    assert page.count("### Zen") == 2 and page.count("| SmolLM2 Q6_K | 2.00x") == 1 and "2.40x" in page


def test_goals_are_judged_against_the_better_of_the_others() -> None:
    cells = {
        "Octavo": cell(100.0, start_cpu_s=4.0, pss_bytes_after=6e8, ttft_512_ms=200.0),
        "llama.cpp": cell(80.0, start_cpu_s=1.0),
        "vLLM": cell(95.0, ttft_512_ms=250.0, pss_bytes_after=5e9),
    }
    judged = {g.what.partition(": ")[2]: g for g in file_report.goals(file_report.File("smollm2-bf16", "x", cells))}
    assert judged["1 user, the better of the others"].value == pytest.approx(100 / 95)
    assert judged["at 8, vLLM's precision"].met is False
    assert judged["first token of 512, the better"].value == pytest.approx(200 / 250)
    assert judged["memory after the runs, llama.cpp"].value == pytest.approx(1.2)
    start = judged["CPU seconds of a start, 2 x llama.cpp's + 1"]
    assert (start.value, start.bound, start.met) == (4.0, 3.0, False)


def test_a_model_of_4_billion_has_goals_of_its_own() -> None:
    """One user waits for memory there, and prompts for arithmetic."""
    cells = {"Octavo": cell(107.0, long_ttft_ms=800.0), "llama.cpp": cell(100.0, long_ttft_ms=1000.0)}

    def met(name: str) -> list[bool]:
        judged = {g.what.partition(": ")[2]: g for g in file_report.goals(file_report.File(name, "x", cells))}
        users, prompt = "user, the better of the others", "first token of a long prompt, the better"
        return [judged[f"1 {users}"].met, judged[f"8 {users}".replace("user", "users")].met, judged[prompt].met]

    assert met("qwen3-4b-q4_k_m") == [True, False, False]
    assert met("llama-1b-q4_k_m") == [False, False, True]


def test_a_file_that_an_engine_cannot_serve_is_a_row_that_says_so(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF and no more")
    file = model_files.ModelFile("damaged", "a damaged file", damaged)
    engine = files.engine_of("Octavo", file, tmp_path)
    assert engine is not None and files.engine_of("vLLM", file, tmp_path) is None
    found = files.measure(engine, file, files.Prompts(), quick=True) | ABOUT
    assert "it ended with exit code" in found["error"] and "damaged.gguf" in found["error"]
    (row,) = file_report.rows(file_report.File("damaged", "a damaged file", {"Octavo": found}))
    assert len(row) == len(file_report.HEAD) and row[2].startswith("not served: ")


@pytest.mark.parametrize(
    ("shape", "more"),
    [
        (random_models.LLAMA_1B, {}),
        (random_models.QWEN3_0_6B, {}),
        (random_models.GPT_OSS_20B, {"num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
    ids=lambda value: value.get("model_type", ""),
)
def test_a_checkpoint_and_its_gguf_file_are_one_model(
    shape: dict[str, Any], more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 320,
    }
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tokenizer").mkdir()
    vocabulary = {chr(0x21 + i): i for i in range(80)}
    tokenizer = {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "added_tokens": []}
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer" / "config.json").write_text("{}")
    random_models.write_checkpoint(shape | small | more, tmp_path / "tokenizer", tmp_path / "m")
    random_models.write_gguf(tmp_path / "m", tmp_path / "m.gguf")
    tokens = [[3, 250, 7, 19, 301, 3, 3]]
    (one,), (other,) = (logits_of(load(path), tokens) for path in (tmp_path / "m", tmp_path / "m.gguf"))
    assert one.shape[1] == 320 and one.std() > 1e-3
    assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
