"""DRY, XTC and top-n-sigma against plain references, written from their definitions."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.interface.sampling_params import SamplingParams
from octavo.sample import Sampler, SamplingStates
from octavo.sample.shaping import Repetition, ends_of, match_lengths, without_top_choices

from .sampling_helpers import draw_counts, normal_logits, processed

VOCAB = 6
texts = st.lists(st.integers(0, VOCAB - 1), min_size=3, max_size=60)


def penalties(
    tokens: list[int],
    multiplier: float,
    base: float,
    allowed: int,
    last_n: int,
    ends: set[int],
    sequences: list[list[int]],
) -> list[float]:
    """What DRY takes from each token, by looking at every earlier place."""
    seen = tokens if last_n < 0 else tokens[max(0, len(tokens) - last_n) :]
    stops = {i for i, token in enumerate(seen) if token in ends}
    stops |= {i for s in sequences for i in range(len(s) - 1, len(seen)) if seen[i + 1 - len(s) : i + 1] == s}
    room = len(seen) - 1 - max(stops, default=-1)
    found = [0.0] * VOCAB
    for place in range(1, len(seen)):  # the token there may come next
        length = 0
        while length < min(place, room) and seen[place - 1 - length] == seen[-1 - length]:
            length += 1
        if length >= max(1, allowed):
            found[seen[place]] = max(found[seen[place]], multiplier * base ** (length - allowed))
    return found if len(seen) > max(1, allowed) else [0.0] * VOCAB


@given(
    texts,
    st.floats(0.1, 3),
    st.sampled_from([1.0, 1.2, 1.75, 3.0]),
    st.integers(0, 4),
    st.sampled_from([-1, 1, 5, 20]),
    st.sets(st.integers(0, VOCAB - 1), max_size=1),
    st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=3), max_size=1),
    st.integers(0, 9),
)
def test_dry_takes_from_each_token_what_its_longest_match_costs(
    text, multiplier, base, allowed, last_n, ends, sequences, seed
) -> None:
    params = SamplingParams(
        temperature=0,
        dry_multiplier=multiplier,
        dry_base=base,
        dry_allowed_length=allowed,
        dry_penalty_last_n=last_n,
        dry_breaker_token_ids=sorted(ends),
        dry_breaker_sequences=sequences,
    )
    logits = normal_logits(1, VOCAB, seed)
    cut = random.Random(seed).randrange(1, len(text))
    found = processed(logits, params, prompt=text[:cut], output=text[cut:])
    expected = logits[0].double() - torch.tensor(penalties(text, multiplier, base, allowed, last_n, ends, sequences))
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_long_matches_and_long_texts_stay_finite_and_bounded() -> None:
    text = [1, 2] * 5_000
    params = SamplingParams(temperature=0, dry_multiplier=5.0, dry_base=100.0, dry_breaker_token_ids=[])
    found = processed(torch.zeros(1, VOCAB), params, prompt=text, output=[])
    assert torch.isfinite(found).all() and found[1] < -1e30 and found[2] == 0
    one = Repetition(1.0, 1.0, 2, -1, torch.zeros(VOCAB, dtype=torch.bool), [])
    assert one.longest == 2, "with base 1 longer matches cost no more"
    tokens = torch.tensor(text)
    assert match_lengths(tokens, ends_of(tokens, one), 7).max() == 7


@given(st.integers(0, 10**6), st.floats(0, 0.5), st.booleans(), st.integers(2, 40))
def test_xtc_leaves_of_the_likely_tokens_the_least_likely(seed, threshold, applies, vocab) -> None:
    logits = normal_logits(1, vocab, seed)
    rng = random.Random(seed)
    keep = torch.tensor([[rng.random() < 0.7 for _ in range(vocab)]])
    keep[0, rng.randrange(vocab)] = True
    found = without_top_choices(logits, keep, torch.tensor([[threshold]]), torch.tensor([applies]))[0].tolist()
    alive = [i for i in range(vocab) if keep[0, i]]
    weights = {i: math.exp(float(logits[0, i])) for i in alive}
    shares = {i: weight / sum(weights.values()) for i, weight in weights.items()}
    if any(abs(share - threshold) < 1e-6 for share in shares.values()):
        return  # float32 decides
    likely = sorted((i for i in alive if shares[i] >= threshold), key=lambda i: (-shares[i], i))
    removed = set(likely[:-1]) if applies else set()
    assert found == [i in alive and i not in removed for i in range(vocab)]
    assert any(found)


def test_xtc_applies_as_often_as_its_probability_says_after_the_cuts() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.15, 0.1, 0.05]]))
    n = 4_000
    params = SamplingParams(temperature=1.0, seed=3, xtc_probability=0.25, xtc_threshold=0.2, top_k=4)
    counts = draw_counts(logits[0], params, n)
    whole = np.array([0.4, 0.3, 0.15, 0.1, 0]) / 0.95
    cut = np.array([0, 0.3, 0.15, 0.1, 0]) / 0.55  # of 0.42 and 0.32 the second stays
    expected = n * (0.75 * whole + 0.25 * cut)
    assert counts[4] == 0 and np.abs(counts - expected).max() < 5 * math.sqrt(n * 0.25)


@given(st.integers(0, 10**6), st.floats(0.1, 3), st.integers(2, 50))
def test_sigma_keeps_what_is_near_the_best(seed, width, vocab) -> None:
    logits = normal_logits(1, vocab, seed)
    logits[0, 0] = -math.inf if vocab > 3 else logits[0, 0]
    found = processed(logits, SamplingParams(temperature=0, top_n_sigma=width))
    values = logits[0][torch.isfinite(logits[0])].double().numpy()
    line = values.max() - width * values.std()
    for before, after in zip(logits[0].tolist(), found.tolist(), strict=True):
        if abs(before - line) > 1e-5:
            assert after == (before if before >= line else -math.inf)


KINDS = [
    {},
    {"temperature": 0},
    {"top_k": 5, "top_p": 0.9},
    {"min_p": 0.05},
    {"presence_penalty": 1.0},
    {"dry_multiplier": 0.8, "dry_breaker_token_ids": [3]},
    {"xtc_probability": 0.7},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05, "top_p": 0.8, "dry_multiplier": 1.0},
    {"top_n_sigma": 1.0},
]


@pytest.mark.parametrize("use_kernels", [False, True])
def test_no_row_depends_on_its_company(use_kernels: bool) -> None:
    rng = random.Random(5)
    texts = [[rng.randrange(20) for _ in range(40)] for _ in KINDS]
    params = [SamplingParams(**{"seed": 7, "temperature": 0.9, "logprobs": 2, **kind}) for kind in KINDS]
    logits = normal_logits(len(KINDS), 20, 9)
    states = SamplingStates(len(KINDS), 20, use_kernels=use_kernels)
    for row, (param, text) in enumerate(zip(params, texts, strict=True)):
        states.add_request(row, param, text[:9], text[9:], frozenset(), 0, 0)
    together = Sampler()(logits.clone(), states.make_metadata(range(len(KINDS)), [40] * len(KINDS)))
    for row, (param, text) in enumerate(zip(params, texts, strict=True)):
        one = SamplingStates(1, 20, use_kernels=use_kernels)
        one.add_request(0, param, text[:9], text[9:], frozenset(), 0, 0)
        alone = Sampler()(logits[row : row + 1].clone(), one.make_metadata([0], [40]))
        assert together.sampled_token_ids[row] == alone.sampled_token_ids[0]
        assert together.logprobs is not None and alone.logprobs is not None
        assert torch.equal(together.logprobs.token_ids[row], alone.logprobs.token_ids[0])
        assert torch.equal(together.logprobs.logprobs[row], alone.logprobs.logprobs[0])
    for row in range(len(KINDS)):
        states.remove_request(row)
    assert states.needs_sampler(np.arange(len(KINDS))) is None
