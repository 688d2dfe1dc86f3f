"""What the comparison of answers with others tells apart: a format that is read wrongly, and rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.peers import agreement

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def told(logits: torch.Tensor, count: int = agreement.TOP) -> dict[str, dict[str, float]]:
    """As a server tells the likeliest tokens, and one more that the prompt had."""
    rows = logits.log_softmax(-1)
    ranks = rows.argsort(descending=True)
    shown = [*range(count), len(rows) - 1]
    return {str(int(ranks[rank])): {"logprob": rows[ranks[rank]].item(), "rank": rank + 1} for rank in shown}


def test_divergence_is_that_of_all_tokens_where_few_count() -> None:
    torch.manual_seed(0)
    logits = 6 * torch.randn(5000)
    for noise in (0.0, 0.05, 0.5):
        other = logits + noise * torch.randn(5000)
        p, q = logits.log_softmax(-1), other.log_softmax(-1)
        kl, same = agreement.divergence(p, told(other))
        assert kl == pytest.approx((p.exp() * (p - q)).sum().item(), rel=0.1, abs=1e-6)
        assert same == (p.argmax() == q.argmax())


def test_the_table_has_a_row_an_engine_and_leaves_out_what_failed() -> None:
    cell = {"file": "awq", "title": "AWQ", "positions": 1992, "kl": 7.9e-4, "top1": 0.958, "same_questions": 3}
    cell |= {"same_prose": 2, "gap": 0.04, "largest_gap": 0.33}
    cells = {name: cell | {"engine": name} for name in ("Octavo", "vLLM bfloat16")}
    cells |= {"refused": {"file": "awq", "title": "AWQ", "engine": "vLLM float32", "error": "not read"}}
    text = agreement.table({"date": "2026-11-23", "commit": "abc", "cpu": "a CPU", "cells": cells})
    assert "| AWQ | vLLM bfloat16 | 1,992 | 7.9e-04 | 95.8% | 3 of 10 | 2 of 10 | 0.04, at most 0.33 |" in text
    assert "float32" not in text


def test_the_gap_is_taken_where_texts_part() -> None:
    likely = [{"token_id:5": -0.1, "token_id:9": -3.0}, {"token_id:7": -0.7, "token_id:8": -0.8, "token_id:1": -4.0}]
    own = {"token_ids": [5, 7], "logprobs": {"top_logprobs": likely}}
    assert agreement.gap(own, [5, 8]) == pytest.approx(0.1)
    assert agreement.gap(own, [5, 2]) == pytest.approx(3.3), "at least"
