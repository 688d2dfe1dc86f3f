"""What is drawn beside drafts has the distribution of what is drawn without, whatever the drafter knows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.interface.sampling_params import SamplingParams
from octavo.sample.sampler import Sampler
from octavo.sample.states import SamplingStates
from octavo.worker.step import DraftRows, Logits, PendingTokens, SampledRows, SampledTokens
from octavo.worker.verification import verify, verify_best
from octavo_kernels import cpu

VOCAB, DRAWS = 64, 20_000


class Draws:
    """Samples as the runner of CPUs does, a sequence a row, each with a seed of its own."""

    def __init__(self, seed: int) -> None:
        self._states = SamplingStates(DRAWS, VOCAB, torch.device("cpu"), False)
        for row in range(DRAWS):
            self._states.add_request(row, SamplingParams(seed=seed * DRAWS + row), [1], [], frozenset(), 0, 0)

    def sample(self, logits: Logits, sampled: SampledRows) -> PendingTokens:
        metadata = self._states.make_metadata(sampled.rows.tolist(), sampled.positions.tolist())
        result = Sampler()(logits.values, metadata, None)
        tokens = SampledTokens(result.sampled_token_ids.tolist(), result.invalid.tolist())
        return lambda: tokens


def rows_of(which: np.ndarray, position: int) -> SampledRows:
    return SampledRows([f"{row}" for row in which], which, np.full(len(which), position, dtype=np.int64), lambda: None)


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """Of Pearson's test; cells of which fewer than five draws are expected count as one."""
    expected, large = probs * counts.sum(), probs * counts.sum() >= 5
    observed = np.append(counts[large], counts[~large].sum())
    expected = np.append(expected[large], expected[~large].sum())
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(observed) - 1) / 2.0), torch.tensor(statistic / 2)))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_adversarial_drafter_bends_no_distribution(seed: int) -> None:
    """It knows what will be drawn, and is right when it likes the token and the one after it, wrong otherwise."""
    draws, everybody = Draws(seed), np.arange(DRAWS)
    generator = torch.Generator().manual_seed(seed)
    first = 1.5 * torch.randn(VOCAB, generator=generator)
    second = 1.5 * torch.randn(VOCAB, VOCAB, generator=generator)  # after each first token
    tokens = draws.sample(Logits(first.expand(DRAWS, VOCAB)), rows_of(everybody, 1))().token_ids
    after = draws.sample(Logits(second[torch.tensor(tokens)]), rows_of(everybody, 2))().token_ids
    drafts = [a if a % 3 and b % 2 else (a + 1 + b) % VOCAB for a, b in zip(tokens, after, strict=True)]

    logits = torch.stack([first.expand(DRAWS, VOCAB), second[torch.tensor(drafts)]], 1).flatten(0, 1)
    sampled = rows_of(everybody, 2)
    rows = DraftRows({f"{row}": [draft] for row, draft in enumerate(drafts)}, sampled)
    result = verify(rows, draws, Logits(logits), sampled, lambda _ids, _depth: None)  # type: ignore[arg-type]
    pairs = {row: [token] for row, token in enumerate(result.token_ids)}
    for req_ids, later in result.later_rounds:
        for req_id, token in zip(req_ids, later.token_ids, strict=True):
            pairs[int(req_id)].append(token)
    left = np.array([row for row, pair in pairs.items() if len(pair) == 1])
    assert (
        0.2 * DRAWS < len(left) < 0.9 * DRAWS and (rows.num_rejected == [len(pairs[i]) == 1 for i in everybody]).all()
    )
    next_step = draws.sample(Logits(second[torch.tensor([pairs[row][0] for row in left])]), rows_of(left, 2))()
    for row, token in zip(left, next_step.token_ids, strict=True):
        pairs[row].append(token)

    counts = np.zeros((VOCAB, VOCAB))
    np.add.at(counts, tuple(np.array(list(pairs.values())).T), 1)
    probs = (first.double().softmax(-1)[:, None] * second.double().softmax(-1)).numpy()
    assert p_value(counts.ravel(), probs.ravel()) > 0.001


@given(st.data())
def test_best_tokens_are_taken_as_they_are_in_rounds(data: st.DataObject) -> None:
    """Also where some rows hold NaN, which nothing can be sampled from."""
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any))
    token, total = st.integers(0, 2), sum(lengths) + len(lengths)
    drafts = {f"{i}": data.draw(st.lists(token, min_size=n, max_size=n)) for i, n in enumerate(lengths) if n}
    best = torch.tensor(data.draw(st.lists(token, min_size=total, max_size=total)))
    values = torch.tensor(
        data.draw(st.lists(st.sampled_from([1.0, 1.0, 1.0, float("nan")]), min_size=total, max_size=total))
    )
    taken: list[tuple[int, int, int]] = []

    class Best:
        def sample(self, logits: Logits, sampled: SampledRows) -> PendingTokens:
            assert logits.best is not None
            ids, found = logits.best.token_ids.tolist(), logits.best.values.tolist()
            taken.extend(zip(sampled.rows.tolist(), sampled.positions.tolist(), ids, strict=True))
            return lambda: SampledTokens(ids, [value != value for value in found])

    everybody, written = np.arange(len(lengths)), np.full((len(lengths), 20), -1)
    results = []
    for best_only in (True, False):
        sampled = SampledRows([f"{i}" for i in everybody], everybody, 9 + np.array(lengths), lambda: None)
        rows = DraftRows(drafts, sampled)
        if best_only:
            logits = Logits(torch.zeros(total, 1), None, (best.tolist(), values.tolist()))
            result = verify_best(rows, logits, sampled, written)
        else:
            logits = Logits(torch.zeros(total, 1), cpu.Best(best, values))
            result = verify(rows, Best(), logits, sampled, lambda _ids, _depth: None)  # type: ignore[arg-type]
        results.append((result, list(np.array(rows.num_rejected))))
    assert results[0] == results[1]
    last = [(int(row), int(at), int(written[row, at])) for row, at in zip(*np.nonzero(written >= 0), strict=True)]
    assert set(last) <= set(taken) and [row for row, _, _ in last] == list(everybody), "where the next step reads"
