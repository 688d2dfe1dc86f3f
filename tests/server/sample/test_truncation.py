"""Top-k, top-p and min-p keep the tokens that transformers keeps, and every way to draw gives the same token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_helpers import normal_logits, sample
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from octavo.interface.sampling_params import SamplingParams
from octavo.sample.candidates import block_floor, candidates
from octavo.sample.gumbel import GumbelNoise, position_keys, stream_key
from octavo.sample.metadata import RandomRows
from octavo.sample.truncation import Cuts, kept_tokens, sample_truncated

NO_IDS = torch.zeros(1, 1, dtype=torch.int64)


def random_rows(n: int, vocab: int, top_k: object = 0, top_p: object = 1.0, min_p: object = 0.0) -> RandomRows:
    def column(value: object, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(value, dtype=dtype).expand(n).clone()

    k = column(top_k, torch.int64)
    keys = torch.from_numpy(position_keys(np.full(n, stream_key(11, 0), np.uint64), np.arange(n)))
    return RandomRows(
        rows=torch.arange(n),
        temperature=torch.ones(n, 1),
        keys=keys,
        top_k=torch.where(k < 1, vocab, k.clamp(max=vocab)),
        top_p=column(top_p, torch.float64),
        min_p=column(min_p, torch.float64),
    )


def kept(scores: Tensor, rows: RandomRows) -> Tensor:
    return kept_tokens(scores, Cuts.of(scores, rows))[0]


def doubtful(scores: Tensor, top_p: float, min_p: float) -> Tensor:
    """Tokens so close to a boundary that float32 rounding in the reference may decide."""
    probs = scores.double().softmax(-1)
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = torch.empty_like(probs).scatter_(1, order, ordered.cumsum(-1) - ordered)
    near_min_p = (probs / probs.amax(-1, keepdim=True) / min_p - 1).abs() < 1e-5 if min_p else torch.tensor(False)
    return ((before - top_p).abs() < 1e-5) | near_min_p


CUT = {
    "top_k": st.integers(1, 400),
    "top_p": st.floats(0.01, 0.999),
    "min_p": st.floats(0.001, 1.0),
}


@settings(max_examples=60)
@given(
    top_k=st.none() | CUT["top_k"],
    top_p=st.none() | CUT["top_p"],
    min_p=st.none() | CUT["min_p"],
    temperature=st.floats(0.2, 3),
    vocab=st.sampled_from([7, 300, 3001]),
    scale=st.sampled_from([0.1, 1.0, 4.0]),
    seed=st.integers(0, 2**31),
)
def test_the_kept_set_is_that_of_transformers(
    top_k: int | None, top_p: float | None, min_p: float | None, temperature: float, vocab: int, scale: float, seed: int
) -> None:
    logits = normal_logits(3, vocab, seed, scale)
    scores = TemperatureLogitsWarper(temperature)(NO_IDS, logits)
    assert torch.equal(scores, logits / temperature)
    expected = scores.clone()
    if min_p is not None:
        expected = MinPLogitsWarper(min_p)(NO_IDS, expected)
    if top_k is not None:
        expected = TopKLogitsWarper(top_k)(NO_IDS, expected)
    restricted = expected
    if top_p is not None:
        expected = TopPLogitsWarper(top_p)(NO_IDS, expected)
    ours = kept(scores, random_rows(3, vocab, top_k or 0, top_p or 1.0, min_p or 0.0))
    unclear = doubtful(restricted, top_p or 2.0, 0) | doubtful(scores, 2.0, min_p or 0)
    assert torch.equal(ours | unclear, (expected > -torch.inf) | unclear)
    assert ours.any(-1).all()


@settings(max_examples=40)
@given(penalty=st.floats(0.2, 4), seed=st.integers(0, 2**31), length=st.integers(1, 40), ahead=st.integers(0, 20))
def test_repetition_penalty_is_that_of_transformers(penalty: float, seed: int, length: int, ahead: int) -> None:
    logits = normal_logits(1, 50, seed)
    ids = torch.randint(0, 50, (1, length + ahead), generator=torch.Generator().manual_seed(seed))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    tokens = ids[0].tolist()
    params = SamplingParams(temperature=0, repetition_penalty=penalty)
    out = sample(logits, [params], [tokens[:length]], [tokens[length:]])
    best = expected[0].argmax().item()
    assert expected[0, out.sampled_token_ids[0]] == expected[0, best]


@settings(max_examples=60)
@given(
    kind=st.sampled_from(["top_k", "top_p", "min_p", "mixed"]),
    vocab=st.sampled_from([50, 2000, 9973]),
    scale=st.sampled_from([0.0, 0.05, 1.0, 5.0]),
    levels=st.sampled_from([0, 3, 40]),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_every_way_draws_the_token_of_the_sorted_row(
    kind: str, vocab: int, scale: float, levels: int, seed: int, data: st.DataObject
) -> None:
    """Look at the best, rejection, sorting: whichever serves a row, the winner of the kept set comes out. With
    ``levels`` the scores are full of exact ties."""
    n = 6
    scores = normal_logits(n, vocab, seed, scale)
    if levels:
        scores = (scores * levels).round() / levels
    cuts = {
        name: [data.draw(values) for _ in range(n)]
        for name, values in CUT.items()
        if name == kind or (kind == "mixed" and data.draw(st.booleans()))
    }
    rows = random_rows(n, vocab, **cuts)
    noise = GumbelNoise(vocab, torch.device("cpu"))
    keep = kept(scores, rows)
    expected = (scores.double() + noise.noise(rows.keys)).masked_fill(~keep, -torch.inf).argmax(-1)
    drawn = sample_truncated(scores.clone(), rows, noise)
    if "top_p" in cuts:  # a sum in another order may decide otherwise about a token right at the boundary
        near = torch.stack([doubtful(scores[i : i + 1], cuts["top_p"][i], 0)[0] for i in range(n)])
        sure = ~(near.gather(1, drawn[:, None]) | near.gather(1, expected[:, None]))[:, 0]
        assert torch.equal(drawn[sure], expected[sure])
    else:
        assert torch.equal(drawn, expected)


def test_ties_at_the_boundary() -> None:
    """Top-k keeps every token as likely as the k-th; top-p keeps the lower ids of the equals that it must cut."""
    scores = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0]])
    assert kept(scores, random_rows(1, 6, top_k=3)).tolist() == [[True, True, True, True, True, False]]
    assert kept(scores, random_rows(1, 6, top_k=2)).tolist() == [[False, True, False, True, False, False]]
    equal = torch.zeros(1, 8)
    assert kept(equal, random_rows(1, 8, top_p=0.5)).tolist() == [[True] * 4 + [False] * 4]
    assert kept(equal, random_rows(1, 8, top_p=0.51)).tolist() == [[True] * 5 + [False] * 3]
    assert kept(equal, random_rows(1, 8, top_p=1e-9)).tolist() == [[True] + [False] * 7]


def test_top_p_of_equals_draws_only_the_lower_ids() -> None:
    """The same through the rejection path, on a vocabulary too wide for the first look."""
    vocab, n = 4000, 300
    drawn = sample(torch.zeros(n, vocab), [SamplingParams(seed=i, top_p=0.25) for i in range(n)]).sampled_token_ids
    assert drawn.max() < 1000
    assert drawn.unique().numel() > 200


@pytest.mark.parametrize("params", [{"top_p": 1e-12}, {"top_k": 1}, {"min_p": 1.0}], ids=str)
def test_at_least_the_best_token_stays(params: dict[str, float]) -> None:
    logits = normal_logits(20, 5000, seed=3)
    out = sample(logits, [SamplingParams(seed=i, temperature=2, **params) for i in range(20)])
    assert torch.equal(out.sampled_token_ids, logits.argmax(-1))


@pytest.mark.parametrize("params", [{"top_k": 50}, {"min_p": 0.1}, {"top_p": 0.9}], ids=str)
def test_one_token_that_is_left_is_drawn(params: dict[str, float]) -> None:
    """What grammars do at every step that they force."""
    logits = torch.full((3, 900), -torch.inf)
    logits[:, 7] = 1.5
    assert sample(logits, [SamplingParams(seed=i, **params) for i in range(3)]).sampled_token_ids.tolist() == [7] * 3
    logits[1] = -torch.inf
    assert sample(logits, [SamplingParams(seed=i, **params) for i in range(3)]).invalid.tolist() == [False, True, False]


@settings(max_examples=60)
@given(
    vocab=st.integers(1, 5000), size=st.integers(1, 200), seed=st.integers(0, 2**31), masked=st.sampled_from([0, 0.999])
)
def test_candidates_are_all_tokens_above_the_floor(vocab: int, size: int, seed: int, masked: float) -> None:
    """Nothing at or above the floor is missing, at least ``size`` of the finite ones are there, ids ascend."""
    scores = normal_logits(3, vocab, seed).masked_fill(
        torch.rand(3, vocab, generator=torch.Generator().manual_seed(seed)) < masked, -torch.inf
    )
    floor = block_floor(scores, size)
    values, ids = candidates(scores, floor)
    for row in range(3):
        expected = torch.nonzero(scores[row] >= floor[row])[:, 0]
        count = len(expected)
        assert torch.equal(ids[row, :count], expected)
        assert torch.equal(values[row, :count], scores[row, expected])
        assert (values[row, count:] == -torch.inf).all()
        assert count >= min(size, int(scores[row].isfinite().sum()))
