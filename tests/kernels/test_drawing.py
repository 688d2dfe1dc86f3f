"""The C kernel that draws tokens, in every instruction set, against the plain reference."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from octavo_kernels import SamplingRows, SamplingTable, cpu, reference

CUTS = [*product([0.0, 0.4, 1.0, 3.0], [0, 1, 30], [1.0, 0.9, 0.2], [0.0, 0.05])]  # temperature, top_k, top_p, min_p


@pytest.mark.parametrize("vocab", [31, 500, 4099])
@pytest.mark.parametrize("scale", [0.2, 4.0])
def test_it_draws_as_the_reference(isa: str, vocab: int, scale: float) -> None:
    if isa == "torch":
        pytest.skip("there is no such kernel without the library")
    count = len(CUTS)
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(vocab)) * scale
    requests = np.zeros(count, cpu.REQUEST)
    requests["repetition"], requests["slot"], requests["count_slot"] = 1, -1, -1
    requests["num_logprobs"] = np.arange(count) % 7 - 1
    requests["temperature"], requests["top_k"], requests["top_p"], requests["min_p"] = np.array(CUTS).T
    requests["temperature"] = requests["temperature"].astype(np.float32)
    requests["top_k"][requests["top_k"] == 0] = vocab
    requests["stream"] = np.arange(count) * 12345
    rows, positions = np.arange(count), np.arange(count) + 3
    drawn = cpu.draw(logits.clone(), requests, rows, positions, columns=6)
    padded = torch.nn.functional.pad(logits, (0, -vocab % 32), value=-torch.inf)
    best = cpu.Best(*cpu.argmax(logits), padded.view(count, -1, 32).amax(-1))
    assert cpu.draw(logits.clone(), requests, rows, positions, best, columns=6)[:2] == drawn[:2]
    table = SamplingTable(
        temperature=torch.from_numpy(requests["temperature"].astype(np.float32)),
        top_k=torch.from_numpy(requests["top_k"].copy()),
        top_p=torch.from_numpy(requests["top_p"].copy()),
        min_p=torch.from_numpy(requests["min_p"].copy()),
        streams=torch.from_numpy(requests["stream"].astype(np.int64)),
    )
    wanted = reference.sample(logits, SamplingRows(table, torch.from_numpy(rows), torch.from_numpy(positions), True))
    assert drawn[:2] == (wanted.token_ids.tolist(), [False] * count)
    assert drawn.logprobs is not None
    ids, values, ranks = reference.top_logprobs(logits, torch.from_numpy(rows), wanted.token_ids, 5)
    for i, wants in enumerate(requests["num_logprobs"]):
        if wants >= 0:
            assert drawn.logprobs[0][i, : wants + 1].tolist() == ids[i, : wants + 1].tolist()
            np.testing.assert_allclose(drawn.logprobs[1][i, : wants + 1], values[i, : wants + 1], atol=2e-5)
            assert abs(int(drawn.logprobs[2][i]) - int(ranks[i])) <= 1  # rounding may make two equal


@pytest.mark.parametrize("vocab", [33, 70, 500, 4099])
@pytest.mark.parametrize("guessed", [False, True], ids=["known", "guessed"])
def test_what_a_grammar_forbids_is_as_if_it_had_no_chance(isa: str, vocab: int, guessed: bool) -> None:
    """Also for tokens behind guesses, with what the head tells of its parts, and where a mask ends within a word."""
    if isa == "torch":
        pytest.skip("there is no such kernel without the library")
    count, rng = len(CUTS), np.random.default_rng(vocab)
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    requests = np.zeros(count, cpu.REQUEST)
    requests["repetition"], requests["slot"], requests["count_slot"], requests["num_logprobs"] = 1, -1, -1, -1
    requests["temperature"], requests["top_k"], requests["top_p"], requests["min_p"] = np.array(CUTS).T
    requests["top_k"][requests["top_k"] == 0] = vocab
    requests["stream"] = np.arange(count) * 54321
    allowed = rng.random((count, vocab)) < rng.choice([0.02, 0.5, 0.98], (count, 1))
    allowed[:, -1] = True
    words = np.zeros((count, -(-vocab // 32) * 32), bool)
    words[:, :vocab] = allowed
    mask = torch.from_numpy(np.packbits(words, axis=1, bitorder="little").view(np.int32).copy())
    rows, positions = np.arange(count), np.arange(count) + 3
    known = positions - 1 if guessed else None
    likely = logits.masked_fill(~torch.from_numpy(allowed), -torch.inf)
    wanted = cpu.draw(likely, requests, rows, positions, known=known)
    padded = torch.nn.functional.pad(logits, (0, -vocab % 32), value=-torch.inf)
    best = cpu.Best(*cpu.argmax(logits), padded.view(count, -1, 32).amax(-1))
    for told in (None, cpu.Best(*best[:2]), best):
        drawn = cpu.draw(logits.clone(), requests, rows, positions, told, mask, known=known)
        assert drawn[:2] == wanted[:2]
        assert all(allowed[row, token] for row, token in enumerate(drawn.token_ids))
