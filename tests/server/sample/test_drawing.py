"""Drawing in C: the tokens, and the histories, of the torch path, whatever a request asks for and beside whom."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_helpers import PROMPT, chi_square_sigma, normal_logits
from test_distribution import exact
from test_sampler import any_params
from torch import Tensor

from octavo.interface.sampling_params import SamplingParams
from octavo.sample import Sampler, SamplerOutput, SamplingStates
from octavo.sample.constraints import pack_bitmask
from octavo_kernels import cpu

pytestmark = pytest.mark.skipif(cpu.unavailable_reason() is not None, reason="there are no C kernels")
STOPS = frozenset({3})
KNOWN = ["nothing", "best", "maxima"]  # of the logits


def states_of(params: Sequence[SamplingParams], vocab: int, outputs: Sequence[Sequence[int]]) -> SamplingStates:
    states = SamplingStates(len(params), vocab)
    for row, (param, output) in enumerate(zip(params, outputs, strict=True)):
        states.add_request(row, param, PROMPT, output, STOPS, 0, default_seed=0)
    return states


def positions_of(outputs: Sequence[Sequence[int]]) -> list[int]:
    return [len(PROMPT) + len(output) for output in outputs]


def draw(
    logits: Tensor,
    params: Sequence[SamplingParams],
    outputs: Sequence[Sequence[int]] | None = None,
    bitmask: Tensor | None = None,
    states: SamplingStates | None = None,
    knows: str = "nothing",
) -> cpu.Drawn:
    """One step in C; the logits stay as they are."""
    outputs = outputs or [[]] * len(params)
    states = states or states_of(params, logits.shape[1], outputs)
    assert states.draws
    best = None if knows == "nothing" else cpu.Best(*cpu.argmax(logits), largest(logits) if knows == "maxima" else None)
    rows = np.arange(len(params))
    return states.draw(logits.clone(), rows, np.array(positions_of(outputs)), best, bitmask)


def largest(logits: Tensor) -> Tensor:
    """Of each 32, as a head tells them."""
    count, vocab = logits.shape
    padded = torch.nn.functional.pad(logits, (0, -vocab % 32), value=-torch.inf)
    return padded.view(count, -1, 32).amax(-1)


def draw_in_torch(
    logits: Tensor,
    params: Sequence[SamplingParams],
    outputs: Sequence[Sequence[int]],
    bitmask: Tensor | None = None,
    states: SamplingStates | None = None,
) -> SamplerOutput:
    states = states or states_of(params, logits.shape[1], outputs)
    metadata = states.make_metadata(range(len(params)), positions_of(outputs))
    metadata.grammar_bitmask = bitmask
    return Sampler()(logits.clone(), metadata)


def assert_same(drawn: cpu.Drawn, wanted: SamplerOutput, params: Sequence[SamplingParams]) -> None:
    assert drawn.invalid == wanted.invalid.tolist()
    for i in (i for i, invalid in enumerate(drawn.invalid) if not invalid):
        assert drawn.token_ids[i] == wanted.sampled_token_ids[i], params[i]
        if (told := params[i].logprobs) is not None:
            assert drawn.logprobs is not None and wanted.logprobs is not None
            ids, values, ranks = drawn.logprobs
            other_ids, other_values = (
                part[i, : told + 1].numpy() for part in (wanted.logprobs.token_ids, wanted.logprobs.logprobs)
            )
            np.testing.assert_allclose(values[i, : told + 1], other_values, atol=2e-5)
            likely = other_values > -np.inf  # of tokens that never come there are more than are told
            assert ids[i, : told + 1][likely].tolist() == other_ids[likely].tolist()
            assert abs(int(ranks[i]) - int(wanted.logprobs.ranks[i])) <= 1  # it may be a rounding that makes two equal


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), vocab=st.sampled_from([7, 500, 4999]))
def test_it_draws_the_tokens_of_the_torch_path(seed: int, vocab: int) -> None:
    rng = random.Random(seed)
    count = rng.choice([1, 3, 20])
    logits = normal_logits(count, vocab, seed, rng.choice([0.3, 2.0, 6.0]))
    if rng.random() < 0.3:
        logits = logits.bfloat16().float()  # full of ties
    params = [any_params(rng) if vocab > 300 else SamplingParams(top_p=0.8, seed=i, min_tokens=2) for i in range(count)]
    outputs = [[rng.randrange(vocab) for _ in range(rng.randrange(6))] for _ in range(count)]
    bitmask = None
    if rng.random() < 0.3:
        allowed = [torch.randperm(vocab)[: rng.choice([2, vocab // 2, vocab])] for _ in range(count)]
        bitmask = torch.stack([pack_bitmask(ids, vocab) for ids in allowed])
    ours, theirs = (states_of(params, vocab, outputs) for _ in range(2))
    drawn = draw(logits, params, outputs, bitmask, ours, knows=rng.choice(KNOWN))
    wanted = draw_in_torch(logits, params, outputs, bitmask, theirs)
    assert_same(drawn, wanted, params)
    if not any(drawn.invalid):
        assert torch.equal(ours.pool.history, theirs.pool.history)
        assert torch.equal(ours.pool.counts, theirs.pool.counts)
        assert ours.pool.seen is not None and theirs.pool.seen is not None
        assert torch.equal(ours.pool.seen, theirs.pool.seen)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_guesses_are_drawn_behind_what_is_known_and_leave_nothing(seed: int) -> None:
    """As by the torch path with the histories of the known tokens, the noise and the shortest answer of the guess."""
    rng = random.Random(seed)
    logits, params = normal_logits(9, 500, seed, 2.0), [any_params(rng) for _ in range(9)]
    outputs = [[rng.randrange(500) for _ in range(rng.randrange(6))] for _ in range(9)]
    states, rows, known = states_of(params, 500, outputs), np.arange(9), np.array(positions_of(outputs))
    positions = known + rng.randrange(4)
    now, then = (states.make_metadata(range(9), at.tolist()) for at in (known, positions))
    wanted = replace(then, penalties=now.penalties, bad_words=now.bad_words, append=None, logprobs_rows=None)
    expected = Sampler()(logits.clone(), replace(wanted, num_logprobs=None))
    before = states.pool.history.clone(), states.pool.counts.clone()
    drawn = states.draw(logits.clone(), rows, positions, known=known)
    assert drawn == (expected.sampled_token_ids.tolist(), expected.invalid.tolist(), None)
    assert torch.equal(states.pool.history, before[0]) and torch.equal(states.pool.counts, before[1])


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_alone_or_in_a_crowd_the_tokens_are_the_same(seed: int) -> None:
    rng = random.Random(seed)
    logits, params = normal_logits(9, 4999, seed, 2.0), [any_params(rng) for _ in range(9)]
    crowd = draw(logits, params, knows="maxima").token_ids
    assert crowd == [draw(logits[i : i + 1], params[i : i + 1]).token_ids[0] for i in range(9)]


@pytest.fixture
def restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("restored_threads")
def test_the_number_of_threads_changes_nothing() -> None:
    rng = random.Random(1)
    logits, params = normal_logits(12, 49_152, seed=5), [any_params(rng) for _ in range(12)]
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        drawn = draw(logits, params)
        results.append((drawn.token_ids, drawn.invalid))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"temperature": 0.5, "top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(told: dict[str, float]) -> None:
    vocab, batch, params = 300, 500, SamplingParams(seed=3, **told)
    logits = normal_logits(1, vocab, seed=4)
    states, counts = states_of([params] * batch, vocab, [[]] * batch), np.zeros(vocab, np.int64)
    for start in range(0, 20_000, batch):
        at = np.arange(start, start + batch) + len(PROMPT)
        tokens = states.draw(logits.repeat(batch, 1), np.arange(batch), at).token_ids
        counts += np.bincount(tokens, minlength=vocab)
    assert chi_square_sigma(counts, exact(logits[0], params)) < 4


EDGES = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(top_k=1),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_p=1 - 1e-12),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=1e-5),
    SamplingParams(temperature=1e6),
    SamplingParams(temperature=1e-5, top_p=0.5, top_k=3),
    SamplingParams(top_k=4998, top_p=0.99),
]


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4, 1e38])
@pytest.mark.parametrize("shape", ["as they are", "few left", "one left"])
@pytest.mark.parametrize("knows", ["nothing", "maxima"])
def test_edges_are_as_in_the_torch_path(scale: float, shape: str, knows: str) -> None:
    logits = normal_logits(1, 4999, 2, 1.0).clamp(-3, 3) * scale
    if shape != "as they are":
        logits[:, 5 if shape == "one left" else 40 :] = -torch.inf
        logits[:, :4] = -torch.inf
    rows, outputs = logits.repeat(len(EDGES), 1), [[]] * len(EDGES)
    ours, theirs = draw(rows, EDGES, knows=knows), draw_in_torch(rows, EDGES, outputs)
    assert ours.invalid == theirs.invalid.tolist()
    for params, mine, other in zip(EDGES, ours.token_ids, theirs.sampled_token_ids.tolist(), strict=True):
        # The mass of a tail is a sum of thousands: where that of the cut is next to 1, its rounding decides.
        assert mine == other or (params.top_p == 1 - 1e-12 and logits[0, mine] > -torch.inf), params


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [0, 77, 4998])
@pytest.mark.parametrize("knows", KNOWN)
def test_broken_rows_are_told_and_harm_no_other(broken: float, at: int, knows: str) -> None:
    logits = normal_logits(2 * len(EDGES), 4999, 2, 1.0)
    whole = draw(logits, EDGES * 2, knows=knows).token_ids
    logits[: len(EDGES), at] = broken
    tokens, invalid, _ = draw(logits, EDGES * 2, knows=knows)
    assert invalid == [True] * len(EDGES) + [False] * len(EDGES)
    assert tokens == [0] * len(EDGES) + whole[len(EDGES) :]


@pytest.mark.parametrize("knows", KNOWN)
def test_rows_with_nothing_allowed_are_told(knows: str) -> None:
    bitmask = torch.zeros(len(EDGES), -(-4999 // 32), dtype=torch.int32)
    drawn = draw(normal_logits(len(EDGES), 4999, 2), EDGES, bitmask=bitmask, knows=knows)
    assert drawn.invalid == [True] * len(EDGES)


@pytest.mark.parametrize("told", [0, 1, 5, 300, -1])
@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("knows", ["nothing", "maxima"])
def test_log_probabilities_are_those_of_the_model(told: int, constrained: bool, knows: str) -> None:
    logits = (normal_logits(6, 1000, 3) * 4).round() / 4  # full of ties
    logits[3:, 100:] = -torch.inf
    params = [SamplingParams(seed=i, logprobs=told, frequency_penalty=0.5 * constrained) for i in range(6)]
    outputs = [[5, 5, 9]] * 6
    params[0].logprobs = None
    width = 1000 if told < 0 else told
    ours, theirs = draw(logits, params, outputs, knows=knows), draw_in_torch(logits, params, outputs)
    for one in params:
        one.logprobs = None if one.logprobs is None else width
    assert_same(ours, theirs, params)
    assert ours.logprobs is not None and theirs.logprobs is not None
    assert ours.logprobs[2][1:].tolist() == theirs.logprobs.ranks[1:].tolist()


def test_histories_are_as_long_as_those_that_have_one() -> None:
    params = [SamplingParams(seed=1), SamplingParams(seed=1, presence_penalty=0.5)]
    states = states_of(params, 500, [[], []])
    rows = np.arange(2)
    states.draw(normal_logits(2, 500, 1), rows, np.array([10**6, 400]))
    assert 400 < states.pool.history.shape[1] < 10**4
    states.remove_request(1)
    states.draw(normal_logits(1, 500, 1), rows[:1], np.array([10**6]))
    assert states.pool.history.shape[1] < 10**4
