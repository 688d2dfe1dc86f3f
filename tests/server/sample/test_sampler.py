"""One row's result is its own: alone or in a crowd, in any row, with any number of threads, next to broken logits."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_helpers import PROMPT, normal_logits, sample

from octavo.interface.sampling_params import SamplingParams
from octavo.sample import Sampler, SamplingStates, devices

VOCAB = 4999


def any_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.0, 2.5]),
        top_k=rng.choice([0, 0, 1, 40, 500]),
        top_p=rng.choice([1.0, 1.0, 0.5, 0.95, 0.9999]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.0001]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        presence_penalty=rng.choice([0.0, 0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.7]),
        logit_bias=rng.choice([None, None, {7: 5.0}]),
        allowed_token_ids=rng.choice([None, None, None, list(range(300))]),
        bad_words_token_ids=rng.choice([[], [], [[2], [1, 2, 4]]]),
        min_tokens=rng.choice([0, 5]),
        logprobs=rng.choice([None, None, 0, 5]),
        seed=rng.randrange(5),
    )


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31))
def test_alone_or_in_a_crowd_the_bits_are_the_same(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.choice([2, 9, 40])
    logits = normal_logits(n, VOCAB, seed, rng.choice([0.3, 2.0, 6.0]))
    if rng.random() < 0.3:
        logits = logits.bfloat16().float()  # as a bf16 model gives them: full of ties
    params = [any_params(rng) for _ in range(n)]
    crowd = sample(logits, params, stop_token_ids=frozenset({3}))
    other_rows = rng.sample(range(200), n)
    moved = sample(logits, params, stop_token_ids=frozenset({3}), rows=other_rows)
    assert torch.equal(crowd.sampled_token_ids, moved.sampled_token_ids)
    for i in rng.sample(range(n), 2):
        alone = sample(logits[i : i + 1], params[i : i + 1], stop_token_ids=frozenset({3}))
        assert alone.sampled_token_ids[0] == crowd.sampled_token_ids[i]
        if alone.logprobs is not None:
            assert crowd.logprobs is not None
            assert torch.equal(
                alone.logprobs.logprobs[0], crowd.logprobs.logprobs[i, : alone.logprobs.logprobs.shape[1]]
            )


@pytest.mark.parametrize("seed", range(4))
def test_the_plain_torch_twins_give_the_same_tokens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other devices run, against what the CPU runs."""
    rng = random.Random(seed)
    logits = normal_logits(40, VOCAB, seed, 2.0)
    params = [any_params(rng) for _ in range(40)]
    ours = sample(logits, params, stop_token_ids=frozenset({3}))
    monkeypatch.setattr(devices, "on_cpu", lambda tensor: False)
    plain = sample(logits, params, stop_token_ids=frozenset({3}))
    assert torch.equal(ours.sampled_token_ids, plain.sampled_token_ids)
    assert ours.logprobs is not None
    assert plain.logprobs is not None
    for i, param in enumerate(params):
        wanted = 0 if param.logprobs is None else param.logprobs + 1
        assert torch.equal(ours.logprobs.token_ids[i, :wanted], plain.logprobs.token_ids[i, :wanted])


@pytest.fixture
def restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("rows", [1, 3])
def test_the_number_of_threads_changes_nothing(rows: int) -> None:
    rng = random.Random(1)
    logits = normal_logits(rows, 49_152, seed=5)
    for _ in range(12):
        params = [any_params(rng) for _ in range(rows)]
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(sample(logits, params))
        for other in results[1:]:
            assert torch.equal(results[0].sampled_token_ids, other.sampled_token_ids)
            if results[0].logprobs is not None:
                assert other.logprobs is not None
                assert torch.equal(results[0].logprobs.logprobs, other.logprobs.logprobs)


def run(params: SamplingParams, steps: int, sample_index: int = 0, restart_at: int | None = None) -> list[int]:
    """A sequence whose logits depend on the position alone; ``restart_at``: preempted there and added again."""
    states, sampler = SamplingStates(1, 200), Sampler()
    output: list[int] = []
    states.add_request(0, params, PROMPT, [], frozenset(), sample_index, 99)
    for step in range(steps):
        if step == restart_at:
            states.remove_request(0)
            states.add_request(0, params, PROMPT, output, frozenset(), sample_index, 99)
        metadata = states.make_metadata([0], [len(PROMPT) + step])
        output.append(int(sampler(normal_logits(1, 200, step), metadata).sampled_token_ids[0]))
    return output


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9, "presence_penalty": 1.0}, {"top_k": 20, "min_p": 0.01}], ids=str)
def test_a_seed_repeats_and_survives_preemption(params: dict[str, float]) -> None:
    first = run(SamplingParams(seed=5, temperature=3, **params), 12)
    assert run(SamplingParams(seed=5, temperature=3, **params), 12) == first
    assert run(SamplingParams(seed=5, temperature=3, **params), 12, restart_at=7) == first
    assert run(SamplingParams(seed=6, temperature=3, **params), 12) != first
    assert run(SamplingParams(seed=5, temperature=3, **params), 12, sample_index=1) != first


def test_the_default_seed_serves_requests_without_one() -> None:
    assert run(SamplingParams(temperature=3), 12) == run(SamplingParams(temperature=3, seed=99), 12)


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(3, 100)
    logits[1, [70, 30]] = 5.0
    logits[2] = -3.0
    out = sample(logits, [SamplingParams(temperature=0)] * 3)
    assert out.sampled_token_ids.tolist() == [0, 30, 0]


@pytest.mark.parametrize("temperature", [0, 1e-9, 9e-6])
def test_tiny_temperatures_are_greedy_and_small_ones_nearly(temperature: float) -> None:
    logits = normal_logits(1, 1000, seed=8)
    assert sample(logits, [SamplingParams(temperature=temperature)]).sampled_token_ids[0] == logits.argmax()
    assert sample(logits, [SamplingParams(temperature=1e-5, seed=1)]).sampled_token_ids[0] == logits.argmax()


def test_the_hottest_temperature_is_uniform_and_still_minds_the_mask() -> None:
    params = [SamplingParams(temperature=1e300, seed=i, allowed_token_ids=[3, 8]) for i in range(200)]
    drawn = sample(normal_logits(200, 50, seed=1), params).sampled_token_ids
    assert sorted(drawn.unique().tolist()) == [3, 8]
    assert 60 < int((drawn == 3).sum()) < 140


BROKEN = {
    "a NaN": lambda row: row.index_fill_(0, torch.tensor([5]), torch.nan),
    "all NaN": lambda row: row.fill_(torch.nan),
    "an infinity": lambda row: row.index_fill_(0, torch.tensor([5]), torch.inf),
    "nothing allowed": lambda row: row.fill_(-torch.inf),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {},
        {"top_k": 5},
        {"top_k": 900},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_p": 0.9, "top_k": 600},
        {"repetition_penalty": 2.0, "logprobs": 3},
        {"presence_penalty": 2.0, "bad_words_token_ids": [[1, 2]]},
    ],
    ids=str,
)
def test_broken_logits_are_reported_and_hurt_nobody(kind: str, params: dict[str, object]) -> None:
    logits = normal_logits(3, 2000, seed=6)
    whole = sample(logits, [SamplingParams(seed=1, **params)] * 3)  # type: ignore[arg-type]
    BROKEN[kind](logits[1])
    out = sample(logits, [SamplingParams(seed=1, **params)] * 3)  # type: ignore[arg-type]
    assert out.invalid.tolist() == [False, True, False]
    assert 0 <= out.sampled_token_ids[1] < 2000
    assert torch.equal(out.sampled_token_ids[[0, 2]], whole.sampled_token_ids[[0, 2]])


def test_some_forbidden_tokens_are_fine() -> None:
    logits = normal_logits(1, 100, seed=7).repeat(50, 1)
    logits[:, ::2] = -torch.inf
    out = sample(logits, [SamplingParams(seed=i, top_p=0.99) for i in range(50)])
    assert not out.invalid.any()
    assert (out.sampled_token_ids % 2 == 1).all()


def test_half_precision_logits_are_sampled_in_float32() -> None:
    logits = normal_logits(4, 500, seed=9).bfloat16()
    params = [SamplingParams(seed=i) for i in range(4)]
    assert torch.equal(sample(logits, params).sampled_token_ids, sample(logits.float(), params).sampled_token_ids)


def test_rows_are_guarded() -> None:
    states = SamplingStates(2, 10)
    states.add_request(0, SamplingParams(), [1], [], frozenset(), 0, 0)
    with pytest.raises(ValueError, match="row 0 is taken"):
        states.add_request(0, SamplingParams(), [1], [], frozenset(), 0, 0)
    with pytest.raises(ValueError, match="without a request"):
        states.make_metadata([0, 1], [1, 1])
    states.remove_request(1)  # free already: nothing happens
