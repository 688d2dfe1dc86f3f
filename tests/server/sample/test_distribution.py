"""What comes out is distributed as the exact softmax of what was asked for (fixed seeds: these cannot flake)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_helpers import chi_square_sigma, draw_counts, normal_logits, sample
from torch import Tensor

from octavo.interface.sampling_params import SamplingParams

DRAWS = 30_000


def exact(logits: Tensor, params: SamplingParams) -> np.ndarray:
    """The distribution by definition, in float64, token by token."""
    probs = (logits.double() / params.temperature).softmax(-1).numpy()
    if params.min_p > 0:
        probs = np.where(probs >= params.min_p * probs.max(), probs, 0)
    order = np.argsort(-probs, kind="stable")
    if 0 < params.top_k < len(probs):
        probs[order[params.top_k :]] = 0
    probs = probs / probs.sum()
    if params.top_p < 1:
        mass = 0.0
        for token in order:
            if mass >= params.top_p:
                probs[token] = 0
            mass += probs[token]
    return probs / probs.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.5),
        SamplingParams(seed=3, temperature=2.0),
        SamplingParams(seed=4, top_k=5),
        SamplingParams(seed=5, top_p=0.7),
        SamplingParams(seed=6, min_p=0.1),
        SamplingParams(seed=7, temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
        SamplingParams(seed=8, top_k=1),
        SamplingParams(seed=9, top_p=1e-6),
    ],
    ids=lambda p: f"T{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}",
)
@pytest.mark.parametrize("vocab", [60, 3000])
def test_draws_follow_the_exact_distribution(params: SamplingParams, vocab: int) -> None:
    logits = normal_logits(1, vocab, seed=vocab)[0]
    counts = draw_counts(logits, params, DRAWS if vocab < 1000 else 6_000)
    probs = exact(logits, params)
    assert counts[probs == 0].sum() == 0
    assert chi_square_sigma(counts, probs) < 4


def test_seeds_and_samples_draw_differently() -> None:
    """First tokens of 10,000 seeds, and of 10,000 samples of one seed, follow the distribution as well."""
    logits = normal_logits(1, 50, seed=0)[0]
    probs = exact(logits, SamplingParams())
    seeds = [SamplingParams(seed=i) for i in range(10_000)]
    tokens = sample(logits.repeat(len(seeds), 1), seeds).sampled_token_ids.numpy()
    assert chi_square_sigma(np.bincount(tokens, minlength=50), probs) < 4


def test_uniform_logits_reach_every_token() -> None:
    counts = draw_counts(torch.zeros(500), SamplingParams(seed=0), 50_000)
    assert chi_square_sigma(counts, np.full(500, 1 / 500)) < 4
