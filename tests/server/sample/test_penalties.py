"""Penalties and bad words over a walk of requests that come, go, are preempted and come back, against plain Python."""

from __future__ import annotations

import random

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sampling_helpers import normal_logits

from octavo.interface.sampling_params import SamplingParams
from octavo.sample import Sampler, SamplingStates

VOCAB = 24


def expected_logits(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> torch.Tensor:
    """The definitions, token by token, in float32 as the sampler computes them."""
    out = torch.tensor(logits)
    for word in params.bad_words_token_ids:
        prefix = word[:-1]
        if not prefix or output[-len(prefix) :] == prefix:
            out[word[-1]] = -torch.inf
    for token in set(prompt) | set(output):
        value = out[token]
        if params.repetition_penalty != 1:
            rep = torch.tensor(params.repetition_penalty)
            value = value / rep if value > 0 else value * rep
        count = output.count(token)
        value = value - torch.tensor(params.frequency_penalty) * count
        value = value - torch.tensor(params.presence_penalty) * (1 if count else 0)
        out[token] = value
    return out


def random_params(rng: random.Random) -> SamplingParams:
    params = SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(1000))
    if rng.random() < 0.5:
        params.repetition_penalty = rng.choice([0.5, 1.3, 2.0])
    if rng.random() < 0.5:
        params.frequency_penalty = rng.choice([-1.0, 0.4, 2.0])
    if rng.random() < 0.5:
        params.presence_penalty = rng.choice([-0.5, 1.5])
    for _ in range(rng.choice([0, 0, 0, 1, 4])):
        params.bad_words_token_ids.append([rng.randrange(4) for _ in range(rng.choice([1, 2, 3]))])
    return params


class Sequence:
    def __init__(self, rng: random.Random) -> None:
        self.params = random_params(rng)
        self.prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 300]))]
        self.output: list[int] = []


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31))
@example(seed=38583)  # a one-token bad word far beyond the positions that anyone's history holds
def test_a_walk_with_preemptions_equals_the_definition(seed: int) -> None:
    """The device notes the tokens itself: the walk passes outputs in only when a preempted sequence comes back."""
    rng = random.Random(seed)
    states, sampler = SamplingStates(6, VOCAB), Sampler()
    running: dict[int, Sequence] = {}
    preempted: list[Sequence] = []
    for step in range(30):
        for row in range(6):
            if row not in running and rng.random() < 0.4:
                sequence = preempted.pop() if preempted and rng.random() < 0.7 else Sequence(rng)
                states.add_request(row, sequence.params, sequence.prompt, sequence.output, frozenset(), 0, 0)
                running[row] = sequence
            elif row in running and rng.random() < 0.1:
                states.remove_request(row)
                if rng.random() < 0.7:
                    preempted.append(running.pop(row))
                else:
                    del running[row]
        rows = [row for row in running if rng.random() < 0.8]
        rng.shuffle(rows)
        if not rows:
            continue
        logits = normal_logits(len(rows), VOCAB, seed + step, 2.0)
        # Pull the walk towards few tokens, so that words complete and counts grow.
        logits[:, :4] += 2
        given_logits = logits.tolist()
        positions = [len(running[r].prompt) + len(running[r].output) for r in rows]
        result = sampler(logits, states.make_metadata(rows, positions))
        for i, row in enumerate(rows):
            sequence = running[row]
            expected = expected_logits(given_logits[i], sequence.params, sequence.prompt, sequence.output)
            torch.testing.assert_close(logits[i], expected, rtol=1e-6, atol=1e-6)
            token = int(result.sampled_token_ids[i])
            if sequence.params.greedy:
                assert logits[i, token] == logits[i].max()
            sequence.output.append(token)


def test_two_steps_in_flight() -> None:
    """Metadata of two steps made before either is sampled: the second sees the first one's token."""
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    states, sampler = SamplingStates(1, 5), Sampler()
    states.add_request(0, params, [4], [], frozenset(), 0, 0)
    first, second = states.make_metadata([0], [1]), states.make_metadata([0], [2])
    logits = torch.tensor([[3.0, 2.0, 0.0, 0.0, 0.0]])
    assert sampler(logits.clone(), first).sampled_token_ids.tolist() == [0]
    assert sampler(logits.clone(), second).sampled_token_ids.tolist() == [1]


def test_memory_is_taken_by_those_who_need_it_and_reused() -> None:
    """Requests without penalties hold no history; slots of gone requests are handed out again."""
    states = SamplingStates(64, 1000)
    for row in range(32):
        states.add_request(row, SamplingParams(), [1, 2], [], frozenset(), 0, 0)
    assert states.pool.history.numel() == 0
    assert states.pool.counts.numel() == 0
    for _ in range(50):
        states.add_request(40, SamplingParams(frequency_penalty=1), [1, 2], [], frozenset(), 0, 0)
        states.add_request(41, SamplingParams(repetition_penalty=2), [1, 2], [], frozenset(), 0, 0)
        states.remove_request(40)
        states.remove_request(41)
    assert states.pool.history.shape[0] <= 4
    assert states.pool.counts.shape[0] <= 4
