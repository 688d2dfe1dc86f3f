"""The page of claims says what was measured, and whether it is what was claimed."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from benchmarks import block_waste, claims_page

ROOT = Path(__file__).parents[3]


RESULTS = json.loads((ROOT / "benchmarks" / "results" / "claims.json").read_text())


def test_the_page_is_that_of_the_figures() -> None:
    assert (ROOT / "docs" / "claims.md").read_text() == claims_page.text_of(RESULTS), "its --draw writes it"
    for file, _, _ in claims_page.PLOTS.values():
        assert (ROOT / "docs" / file).read_bytes()[:4] == b"\x89PNG"


def test_both_ways_of_the_users_claim_answered_every_request() -> None:
    runs = [run for runs in RESULTS["users"]["runs"].values() for run in runs]
    assert len(runs) == 4 and {(run["completed"], run["failed"]) for run in runs} == {(256, 0)}
    assert len({run["mean_length"] for run in runs}) == 1, "the same requests"


def test_a_goal_that_is_missed_is_said() -> None:
    results = copy.deepcopy(RESULTS)
    results["waste"]["block_sizes"]["16"]["mean"] = 0.041
    results["hugging_face"]["runs"][0]["baselines"][0]["ratio"] = 23.9
    waste, alone, *others = claims_page.claims_of(results)
    assert (waste.met, alone.met) == (False, False) and claims_page.text_of(results).count("**missed**") == 2
    assert {claim.met for claim in others} == {None}, "no goal, no verdict"
    del results["hugging_face"], results["users"]
    assert "Hugging Face" not in claims_page.text_of(results), "what was not measured is not there"


@pytest.mark.parametrize("block_size", [1, 16])
def test_waste_is_the_rest_of_last_blocks(block_size: int) -> None:
    steps = block_waste.run(12, block_size, 20, 60)
    for step in steps:
        assert 0 <= step.slots - step.tokens < step.requests * block_size
    assert (min(step.used for step in steps) == 1.0) == (block_size == 1)
