"""What may be said at all: masks, allowed tokens, bad words, min_tokens, biases."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_helpers import normal_logits, processed, sample

from octavo.interface.sampling_params import SamplingParams
from octavo.sample import Sampler, SamplingStates
from octavo.sample.constraints import apply_bitmask, pack_bitmask

GREEDY = {"temperature": 0}
INF = torch.inf


@settings(max_examples=80)
@given(vocab=st.integers(1, 200), data=st.data())
def test_a_bitmask_forbids_what_it_does_not_hold(vocab: int, data: st.DataObject) -> None:
    ids = data.draw(st.sets(st.integers(0, vocab - 1)))
    mask = pack_bitmask(torch.tensor(sorted(ids), dtype=torch.int64), vocab)
    assert mask.shape == (-(-vocab // 32),)
    logits = torch.zeros(2, vocab)
    apply_bitmask(logits, torch.stack((mask, torch.full_like(mask, -1))))
    assert {i for i in range(vocab) if logits[0, i] == 0} == ids
    assert (logits[1] == 0).all()


def test_bits_are_counted_from_the_low_end_of_each_word() -> None:
    """The layout that grammar libraries fill: token id = 32 * word + bit."""
    mask = torch.tensor([[0b101, -(2**31)]], dtype=torch.int32)
    logits = torch.zeros(1, 64)
    apply_bitmask(logits, mask)
    assert torch.nonzero(logits[0] == 0)[:, 0].tolist() == [0, 2, 63]


def test_a_grammar_mask_comes_before_everything_and_is_per_row() -> None:
    states, sampler = SamplingStates(2, 40), Sampler()
    params = SamplingParams(temperature=0, logit_bias={3: 50.0})
    for row in range(2):
        states.add_request(row, params, [1], [], frozenset(), 0, 0)
    metadata = states.make_metadata([0, 1], [1, 1])
    metadata.grammar_bitmask = torch.stack((pack_bitmask(torch.tensor([7, 9]), 40), torch.full((2,), -1).int()))
    logits = torch.zeros(2, 40)
    logits[:, 9] = 1
    assert sampler(logits, metadata).sampled_token_ids.tolist() == [9, 3]


@given(seed=st.integers(0, 2**31), allowed=st.sets(st.integers(0, 99), min_size=1, max_size=10))
@settings(max_examples=30)
def test_allowed_token_ids(seed: int, allowed: set[int]) -> None:
    logits = normal_logits(3, 100, seed)
    params = [SamplingParams(allowed_token_ids=sorted(allowed), seed=seed, temperature=t) for t in (0.0, 1.0)]
    out = sample(logits, [*params, SamplingParams(**GREEDY)]).sampled_token_ids.tolist()
    assert {out[0], out[1]} <= allowed
    assert out[0] == max(sorted(allowed), key=lambda i: logits[0, i])
    assert out[2] == logits[2].argmax()


@pytest.mark.parametrize(
    ("output", "forbidden"),
    [([], {5}), ([1], {5, 2}), ([1, 2], {5, 3}), ([9, 1, 2], {5, 3}), ([2, 1], {5, 2}), ([1, 2, 3], {5})],
)
def test_bad_words_of_several_tokens(output: list[int], forbidden: set[int]) -> None:
    """A word's last token is forbidden only when the output ends with the rest; the prompt does not count."""
    params = SamplingParams(temperature=0, bad_words_token_ids=[[5], [1, 2], [1, 2, 3], [7, 2]])
    logits = processed(torch.zeros(12), params, prompt=[1, 2, 1], output=output)
    assert set(torch.nonzero(logits == -INF)[:, 0].tolist()) == forbidden


def test_min_tokens_holds_back_eos_and_stop_ids() -> None:
    """Until that many tokens are out; only the ids are touched; a preempted request goes on counting."""
    params = SamplingParams(temperature=0, min_tokens=2)
    stops = frozenset({3, 6})
    for length, held in ((0, True), (1, True), (2, False), (3, False)):
        logits = processed(torch.zeros(8), params, output=[1] * length, stop_token_ids=stops)
        assert torch.nonzero(logits == -INF)[:, 0].tolist() == ([3, 6] if held else [])


def test_stop_ids_outside_the_vocabulary_of_the_logits_are_ignored() -> None:
    logits = processed(torch.zeros(8), SamplingParams(temperature=0, min_tokens=2), stop_token_ids=frozenset({3, 900}))
    assert torch.nonzero(logits == -INF)[:, 0].tolist() == [3]


def test_logit_bias_is_added_and_cannot_free_a_forbidden_token() -> None:
    params = SamplingParams(temperature=0, logit_bias={0: 2.5, 3: 100.0, 6: -100.0}, min_tokens=1)
    logits = processed(torch.ones(8), params, stop_token_ids=frozenset({3}))
    assert logits.tolist() == [3.5, 1.0, 1.0, -INF, 1.0, 1.0, -99.0, 1.0]


def test_bias_comes_before_penalties() -> None:
    """-1 + 3 = 2 is positive, so a repetition penalty of 2 halves it: 1, not -2 + 3."""
    params = SamplingParams(temperature=0, logit_bias={1: 3.0}, repetition_penalty=2.0)
    assert processed(torch.full((4,), -1.0), params, prompt=[1]).tolist() == [-1.0, 1.0, -1.0, -1.0]


def test_ids_outside_the_vocabulary_are_refused_by_the_states() -> None:
    """A last line of defence: nothing may reach the batch that would index outside of it."""
    states = SamplingStates(1, 10)
    for params in (
        SamplingParams(logit_bias={10: 1.0}),
        SamplingParams(allowed_token_ids=[11]),
        SamplingParams(bad_words_token_ids=[[1, 12]]),
    ):
        with pytest.raises(ValueError, match="outside the vocabulary of 10"):
            states.add_request(0, params, [1], [], frozenset(), 0, 0)
    with pytest.raises(ValueError, match="prompt_token_ids"):
        states.add_request(0, SamplingParams(presence_penalty=1), [10], [], frozenset(), 0, 0)
    states.add_request(0, SamplingParams(), [1], [], frozenset(), 0, 0)  # nothing of the refused ones is left behind
    assert states.pool.history.numel() == 0
