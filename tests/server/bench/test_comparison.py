"""The comparison with others times what came, when it came, and judges goals by the right engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers import report
from benchmarks.peers.cpus import load_results
from benchmarks.sections import replace_section

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], "usage": None}).encode() + b"\n\n"


def run(engine: str, label: str, rates: dict[int, float], **figures: Any) -> dict[str, Any]:
    levels = [{"users": users, "tok_s": rate, "itl_p50": 10.0, "itl_p99": 20.0} for users, rate in rates.items()]
    return {"engine": engine, "label": label, "levels": levels, **figures}


def test_goals_are_judged_against_each_rival_at_its_best() -> None:
    runs = [
        run("Octavo", "Octavo", {1: 100, 20: 400}, warm_ttft_ms=30, ready_s=[1, 3, 2]),
        run("Octavo", "Octavo", {1: 120, 20: 600}, warm_ttft_ms=50),
        run("vLLM", "vLLM float32", {1: 20, 20: 100}, warm_ttft_ms=160),
        run("vLLM", "vLLM bfloat16", {1: 10, 20: 250}, warm_ttft_ms=100),
        run("Octavo", "Octavo bfloat16", {1: 11, 20: 325}),
        run("llama.cpp", "llama.cpp Q4_0", {1: 110, 20: 200}),
        run("Hugging Face", "generate", {1: 10, 20: 90}),
    ]
    judged = {goal.what: goal for goal in report.goals({"flags": [], "runs": runs})}
    assert judged["20 users, tok/s / vLLM bfloat16"].value == 2.0
    assert not judged["20 users, tok/s / vLLM bfloat16"].met
    assert judged["1 user, tok/s / vLLM float32"].value == 5.5
    assert judged["1 user, tok/s / llama.cpp Q4_0"].value == 1.0
    assert judged["20 users, tok/s / generate, one at a time"].value == 50
    assert judged["20 users, tok/s / generate, static batches of 20"].value == pytest.approx(500 / 90)
    assert judged["warm prefix of 800, TTFT / vLLM bfloat16"].value == pytest.approx(0.4)
    same = {count: judged[f"same precision, {count}, tok/s / vLLM bfloat16"] for count in ("1 user", "20 users")}
    assert {count: (goal.value, goal.met) for count, goal in same.items()} == {
        "1 user": (pytest.approx(1.1), False),
        "20 users": (pytest.approx(1.3), True),
    }
    assert judged["ready, warm cache"].value == 2 and judged["ready, warm cache"].met
    assert not any("64 users" in what for what in judged)  # nothing was measured there


def test_only_the_section_between_its_marks_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin: a -->\nold\n<!-- end: a -->\nafter\n")
    for _ in range(2):
        replace_section(page, "a", "new")
        assert page.read_text() == "before\n<!-- begin: a -->\nnew\n<!-- end: a -->\nafter\n"
    with pytest.raises(ValueError, match="no section b"):
        replace_section(page, "b", "new")


def test_the_pages_say_what_the_figures_say() -> None:
    """Beside the ratio to Hugging Face one at a time stands that to its batches, and how precisely each computes."""
    root = BENCHMARKS.parent
    kinds = load_results(root / "benchmarks/results/comparison.json")
    section = report.markdown(kinds)
    assert section in (root / "docs/measurements.md").read_text()
    assert report.summary({"cpus": dict([report.latest(kinds)])}) in (root / "docs/performance.md").read_text()
    assert report.summary(kinds) in (root / "README.md").read_text()
    rows = [line for line in section.splitlines() if line.startswith("| 20 users, tok/s / Hugging Face")]
    assert len(rows) == 2 * len(kinds["cpus"])
    assert "bfloat16, one at a time" in rows[0] and "bfloat16, static batches of 20" in rows[1]
    assert "Q4_1: 4 bits" in section


def test_each_kind_of_processor_keeps_its_table() -> None:
    """The goal against vLLM depends on the kind: int8 products of a Zen 5 are twice as fast."""
    rates = {"Octavo": {1: 50, 20: 300, 64: 310}, "vLLM bfloat16": {1: 10, 20: 100, 64: 110}}
    runs = [run(label.split()[0], label, levels, flags="serve") for label, levels in rates.items()]
    kinds = {
        "cpus": {
            kind: {
                "date": date,
                "flags": flags,
                "runs": runs,
                "skipped": [],
                "workload": {"model": "m", "input": 1, "output": 1, "quick": False},
            }
            for kind, date, flags in (("Zen 5", "2026-01-02", ["avx_vnni"]), ("Zen 4", "2026-01-01", []))
        }
    }
    page = report.markdown(kinds)
    assert page.index("### Zen 5") < page.index("| 3.00x | ≥ 3.2x, missed |") < page.index("### Zen 4")
    assert page.index("### Zen 4") < page.index("| 3.00x | ≥ 2.5x |")
    assert report.latest(kinds)[0] == "Zen 5"
    assert "Zen 4, 2026-01-01:" in report.summary(kinds)
