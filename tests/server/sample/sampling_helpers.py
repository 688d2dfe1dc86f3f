"""Running the sampler on given logits, and the statistics to judge it by."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.interface.sampling_params import SamplingParams
from octavo.sample import Sampler, SamplerOutput, SamplingStates

PROMPT = [1, 2, 3]


def normal_logits(rows: int, vocab: int, seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    prompts: Sequence[Sequence[int]] | None = None,
    outputs: Sequence[Sequence[int]] | None = None,
    stop_token_ids: frozenset[int] = frozenset(),
    rows: Sequence[int] | None = None,
) -> SamplerOutput:
    """One step of fresh requests; the logits stay as they are."""
    n, vocab = logits.shape
    prompts = prompts or [PROMPT] * n
    outputs = outputs or [[]] * n
    rows = rows if rows is not None else range(n)
    states = SamplingStates(max(rows) + 1, vocab)
    for row, param, prompt, output in zip(rows, params, prompts, outputs, strict=True):
        states.add_request(row, param, prompt, output, stop_token_ids, 0, default_seed=0)
    positions = [len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)]
    return Sampler()(logits.clone(), states.make_metadata(rows, positions))


def processed(logits: Tensor, params: SamplingParams, **kwargs: object) -> Tensor:
    """The logits [V] after everything that a greedy request passes (seen through what the sampler overwrites)."""
    states = SamplingStates(1, logits.shape[-1])
    prompt, output = kwargs.get("prompt", PROMPT), kwargs.get("output", [])
    states.add_request(0, params, prompt, output, kwargs.get("stop_token_ids", frozenset()), 0, 0)  # type: ignore[arg-type]
    work = logits.clone().view(1, -1)
    metadata = states.make_metadata([0], [len(prompt) + len(output)])  # type: ignore[arg-type]
    if "grammar_bitmask" in kwargs:
        metadata.grammar_bitmask = kwargs["grammar_bitmask"]  # type: ignore[assignment]
    Sampler()(work, metadata)
    return work[0]


def draw_counts(logits: Tensor, params: SamplingParams, draws: int, batch: int = 500) -> np.ndarray:
    """How often each token of one distribution [V] comes up at ``draws`` positions of one seeded sequence."""
    vocab = logits.shape[-1]
    states, sampler = SamplingStates(batch, vocab), Sampler()
    for row in range(batch):  # one and the same stream in every row: only the positions differ
        states.add_request(row, params, PROMPT, [], frozenset(), 0, 0)
    counts = np.zeros(vocab, dtype=np.int64)
    for start in range(0, draws, batch):
        positions = range(len(PROMPT) + start, len(PROMPT) + start + batch)
        out = sampler(logits.repeat(batch, 1), states.make_metadata(range(batch), positions))
        counts += np.bincount(out.sampled_token_ids.numpy(), minlength=vocab)
    return counts


def chi_square_sigma(counts: np.ndarray, probs: np.ndarray) -> float:
    """How many standard deviations the chi-square statistic is above what chance gives (Wilson-Hilferty). Cells that
    expect fewer than five draws are pooled."""
    total = counts.sum()
    expected = probs * total
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 1e-9:
        assert observed[-1] == 0, "drew a token of probability zero"
        observed, expected = observed[:-1], expected[:-1]
    freedom = len(expected) - 1
    if freedom == 0:
        return 0.0
    statistic = float(((observed - expected) ** 2 / expected).sum())
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
