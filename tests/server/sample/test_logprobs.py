"""Log-probabilities are those of the model's raw logits, ordered, complete and cheap to trust."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_helpers import normal_logits, sample

from octavo.interface.sampling_params import SamplingParams
from octavo.sample import Sampler, SamplingStates, compute_prompt_logprobs


@settings(max_examples=40)
@given(
    vocab=st.sampled_from([3, 60, 5000]),
    k=st.integers(0, 20),
    levels=st.sampled_from([0, 2]),
    seed=st.integers(0, 2**31),
)
def test_prompt_logprobs_against_the_definition(vocab: int, k: int, levels: int, seed: int) -> None:
    logits = normal_logits(4, vocab, seed)
    if levels:
        logits = (logits * levels).round() / levels  # ties: the lower id first
    tokens = torch.randint(0, vocab, (4,), generator=torch.Generator().manual_seed(seed))
    out = compute_prompt_logprobs(logits, tokens, k)
    reference = logits.double().log_softmax(-1)
    k = min(k, vocab)
    assert out.token_ids.shape == out.logprobs.shape == (4, k + 1)
    for row in range(4):
        token = int(tokens[row])
        order = sorted(range(vocab), key=lambda i: (-logits[row, i].item(), i))
        assert out.token_ids[row].tolist() == [token, *order[:k]]
        torch.testing.assert_close(out.logprobs[row].double(), reference[row, out.token_ids[row]], rtol=0, atol=1e-5)
        assert out.ranks[row] == 1 + int((logits[row] > logits[row, token]).sum())


def test_the_whole_vocabulary_sums_to_one() -> None:
    logits = normal_logits(3, 700, seed=1)
    out = compute_prompt_logprobs(logits, torch.tensor([5, 6, 7]), -1)
    assert out.token_ids.shape == (3, 701)
    torch.testing.assert_close(out.logprobs[:, 1:].exp().sum(-1), torch.ones(3))
    assert (out.logprobs[:, 1:].diff(dim=-1) <= 0).all()
    assert (out.token_ids[:, 1:].sort(-1).values == torch.arange(700)).all()


def test_sampled_logprobs_ignore_what_the_request_did_to_its_logits() -> None:
    """Raw logprobs, whatever the temperature, the bias or the mask; the sampled token first, with its true rank."""
    logits = normal_logits(3, 100, seed=2)
    params = [
        SamplingParams(temperature=0, logprobs=4, logit_bias={17: 100.0}),
        SamplingParams(temperature=3.0, seed=1, logprobs=2, allowed_token_ids=[40, 41]),
        SamplingParams(temperature=1.0, seed=1),
    ]
    out = sample(logits, params)
    assert out.logprobs is not None
    assert out.sampled_token_ids[0] == 17
    reference = logits.log_softmax(-1)
    for row, k in ((0, 4), (1, 2)):
        token = int(out.sampled_token_ids[row])
        assert out.logprobs.token_ids[row, 0] == token
        assert out.logprobs.logprobs[row, 0] == reference[row, token]
        assert out.logprobs.token_ids[row, 1 : k + 1].tolist() == logits[row].topk(k).indices.tolist()
        assert out.logprobs.ranks[row] == 1 + int((logits[row] > logits[row, token]).sum())
    assert out.logprobs.token_ids[2].tolist() == [-1] * 5


@pytest.mark.parametrize("wanted", [0, 3, -1])
def test_a_request_gets_its_number_whatever_others_ask_for(wanted: int) -> None:
    logits = normal_logits(2, 30, seed=3)
    params = SamplingParams(temperature=0, logprobs=wanted)
    alone = sample(logits[:1], [params]).logprobs
    both = sample(logits, [params, SamplingParams(temperature=0, logprobs=7)]).logprobs
    assert alone is not None
    assert both is not None
    columns = 31 if wanted < 0 else wanted + 1
    assert alone.token_ids.shape[1] == columns
    assert torch.equal(alone.token_ids[0], both.token_ids[0, :columns])
    assert torch.equal(alone.logprobs[0], both.logprobs[0, :columns])


def test_nobody_asks_nobody_pays() -> None:
    assert sample(normal_logits(1, 30, seed=3), [SamplingParams()]).logprobs is None


def test_an_empty_prompt_part_has_no_logprobs() -> None:
    out = compute_prompt_logprobs(torch.empty(0, 10), torch.empty(0, dtype=torch.int64), 3)
    assert out.token_ids.shape == (0, 4)


@pytest.mark.parametrize("use_kernels", [False, True])
def test_named_tokens_stand_in_place_of_the_best(use_kernels: bool) -> None:
    """In their rows alone, by the model's own logits, and in the order in which they were named."""
    logits = normal_logits(4, 300, seed=5)
    params = [
        SamplingParams(temperature=0, logprob_token_ids=[250, 3, 77], logit_bias={17: 100.0}),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logprobs=2),
        SamplingParams(temperature=0, logprob_token_ids=[9]),
    ]
    states = SamplingStates(4, 300, use_kernels=use_kernels)
    for row, one in enumerate(params):
        states.add_request(row, one, [1, 2, 3], [], frozenset(), 0, default_seed=0)
    out = Sampler()(logits.clone(), states.make_metadata(range(4), [3] * 4)).logprobs
    assert out is not None
    reference = logits.log_softmax(-1)
    for row, named in ((0, [250, 3, 77]), (3, [9])):
        assert out.token_ids[row, 1 : len(named) + 1].tolist() == named
        torch.testing.assert_close(out.logprobs[row, 1 : len(named) + 1], reference[row, named])
    assert out.token_ids[2, 1:3].tolist() == logits[2].topk(2).indices.tolist()
    assert out.token_ids[0, 0] == 17 and (out.token_ids[1] == -1).all()
    states.remove_request(0)
    states.remove_request(3)
    assert states.needs_sampler(np.arange(4)) is None
