"""Top-k, top-p (Holtzman et al. 2020) and min-p (Nguyen et al. 2024): which tokens stay in the draw.

The three are cuts of the distribution from the top, made in this order: min-p, top-k (every token as likely as the k-th
stays), top-p over what is left (the smallest set that reaches the mass; among equals the lower ids), never empty.

On the CPU a whole row is hardly ever sorted. `sample_truncated` tries, row by row, until one answers:
- the 128 best tokens or so, when the cut is top-k or min-p;
- rejection: the winner of the uncut draw is also the winner of the cut one when it is inside the cut, which a count or
  a sum over the row tells. If it is outside, so is everything below it, and the rest draws again with the same noise
  (the pivot of FlashInfer's sorting-free sampling, Ye et al. 2025, with a fixed noise instead of fresh draws);
- sorting, when several cuts meet in the row's long tail.
Which of them answers depends on the row alone, and so does the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.sample import devices
from octavo.sample.candidates import LOWEST, block_floor, candidates
from octavo.sample.gumbel import GumbelNoise
from octavo.sample.metadata import RandomRows

_NUM_CANDIDATES = 128  # every usual top_k is below


def sample_truncated(scores: Tensor, rows: RandomRows, noise: GumbelNoise) -> Tensor:
    """Draw from the truncated softmax of ``scores`` (float32 [N, V], by temperature already; may be overwritten)."""
    cuts = Cuts.of(scores, rows)
    if not devices.on_cpu(scores):
        return noise.argmax(scores.masked_fill(~kept_tokens(scores, cuts)[0], -torch.inf), rows.keys)
    sampled = torch.empty(len(scores), dtype=torch.int64)
    todo = torch.arange(len(scores))
    for draw, suits in (
        (_from_candidates, cuts.by_rank),
        (_by_rejection, ~(cuts.by_rank & cuts.by_mass)),
        (_by_sorting, torch.ones_like(cuts.by_mass)),
    ):
        index = todo[suits[todo, 0]]
        if len(index):
            some = scores if len(index) == len(scores) else scores[index]
            token, done = draw(some, cuts.of_rows(index), rows.keys[index], noise)
            sampled[index] = token  # for good where it is done
            finished = torch.zeros(len(scores), dtype=torch.bool)
            finished[index] = done
            todo = todo[~finished[todo]]
    return sampled


@dataclass
class Cuts:
    """The cuts of some rows; tensors [N, 1]."""

    best: Tensor  # float32, the largest score
    top_k: Tensor  # int64
    top_p: Tensor  # float64
    min_p_line: Tensor  # float32, the score that a token must reach
    by_rank: Tensor  # bool: top-k or min-p is on
    by_mass: Tensor  # bool: top-p is on

    @classmethod
    def of(cls, scores: Tensor, rows: RandomRows) -> Cuts:
        """Make the cuts of ``scores`` float32 [N, V] from the parameters of the same rows."""
        assert rows.top_k is not None and rows.top_p is not None and rows.min_p is not None
        best = scores.amax(-1, keepdim=True)
        top_k, top_p, min_p = rows.top_k[:, None], rows.top_p[:, None], rows.min_p[:, None]
        line = (best.double() + min_p.log()).float()
        return cls(best, top_k, top_p, line, (top_k < scores.shape[1]) | (min_p > 0), top_p < 1)

    def of_rows(self, index: Tensor) -> Cuts:
        """Return the cuts of the rows ``index``, int64 [M], in ascending order."""
        if len(index) == len(self.best):
            return self
        parts = (self.best, self.top_k, self.top_p, self.min_p_line, self.by_rank, self.by_mass)
        best, top_k, top_p, line, by_rank, by_mass = (part[index] for part in parts)
        return Cuts(best, top_k, top_p, line, by_rank, by_mass)


def kept_tokens(values: Tensor, cuts: Cuts, floor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return which of ``values`` [N, C], by ascending id, stay (bool [N, C]), and for which rows (bool [N]) the answer
    holds for the whole vocabulary. ``floor`` [N]: values holds every token at or above it; None: every token."""
    columns = values.shape[1]
    ordered = _sort_descending(values)
    kth = ordered.gather(1, cuts.top_k.clamp(max=columns) - 1)
    line = torch.maximum(cuts.min_p_line, torch.where(cuts.top_k > columns, -torch.inf, kth))
    if floor is None:
        whole = torch.ones_like(cuts.by_mass)
    else:
        whole = (floor[:, None] <= LOWEST) | (line >= floor[:, None])

    weight = (ordered.double() - cuts.best.double()).masked_fill_(ordered < line, -torch.inf).exp_()
    reached = weight.cumsum(-1)
    last = (reached < cuts.top_p * reached[:, -1:]).sum(-1, keepdim=True)
    last = torch.minimum(last, (ordered >= line).sum(-1, keepdim=True) - 1).clamp(min=0)
    boundary = ordered.gather(1, last)
    equals = last + 1 - (ordered > boundary).sum(-1, keepdim=True)  # how many of the boundary's equals stay
    equal = values == boundary
    nucleus = (values > boundary) | (equal & (equal.cumsum(-1) <= equals))
    keep = torch.where(cuts.by_mass, nucleus, values >= line)
    return keep & (values > -torch.inf), whole[:, 0]


def _from_candidates(scores: Tensor, cuts: Cuts, keys: Tensor, noise: GumbelNoise) -> tuple[Tensor, Tensor]:
    floor = block_floor(scores, _NUM_CANDIDATES)
    values, ids = candidates(scores, floor)
    keep, done = kept_tokens(values, cuts, floor)
    draw = noise.noise(keys, ids).add_(values).masked_fill_(~keep, -torch.inf)
    return ids.gather(1, draw.argmax(-1, keepdim=True))[:, 0], done


def _by_rejection(scores: Tensor, cuts: Cuts, keys: Tensor, noise: GumbelNoise) -> tuple[Tensor, Tensor]:
    """Rows with top-p alone, or without it. Each round leaves half of the mass or so."""
    n = len(scores)
    sampled = torch.empty(n, dtype=torch.int64)
    probs = scores.softmax(-1) if bool(cuts.by_mass.any()) else None
    left = torch.arange(n)
    while len(left):
        token = noise.argmax(scores, keys)[:, None]
        value = scores.gather(1, token)
        above = torch.gt(scores, value, out=torch.empty_like(scores))  # 1.0 or 0.0
        inside = (value >= cuts.min_p_line) & (above.sum(-1, keepdim=True) < cuts.top_k)
        if probs is not None:
            # numpy adds a row up in one order whatever the number of rows and threads, torch's sum does not.
            mass = torch.from_numpy(above.mul_(probs).numpy().sum(-1, keepdims=True)).double()
            mass += _equals_before(scores, token, value, out=above) * probs.gather(1, token)
            inside &= (mass < cuts.top_p) | ~cuts.by_mass
        inside |= ~value.isfinite()  # NaN, or nothing allowed: the caller reports such rows
        sampled[left] = token[:, 0]  # for good where it is inside
        again = torch.nonzero(~inside[:, 0])[:, 0]
        left, token, value = left[again], token[again], value[again]
        if len(again) < len(scores):
            scores, keys, cuts = scores[again], keys[again], cuts.of_rows(again)
            probs = None if probs is None else probs[again]
        ids = torch.arange(scores.shape[1])
        scores.masked_fill_((scores < value) | ((scores == value) & (ids >= token)), -torch.inf)
    return sampled, torch.ones(n, dtype=torch.bool)


def _equals_before(scores: Tensor, token: Tensor, value: Tensor, out: Tensor) -> Tensor:
    """[N, 1]: how many tokens with a lower id are exactly as likely. ``out``: room to work, as large as scores."""
    equal = torch.eq(scores, value, out=out)
    count = equal.sum(-1, keepdim=True)
    tied = torch.nonzero(count[:, 0] > 1)[:, 0]
    before = torch.zeros(len(scores), 1, dtype=torch.float64)
    if len(tied):
        before[tied] = equal[tied].double().cumsum(-1).gather(1, token[tied]) - 1
    return before


def _by_sorting(scores: Tensor, cuts: Cuts, keys: Tensor, noise: GumbelNoise) -> tuple[Tensor, Tensor]:
    keep, done = kept_tokens(scores, cuts)
    return noise.argmax(scores.masked_fill(~keep, -torch.inf), keys), done


def _sort_descending(values: Tensor) -> Tensor:
    if devices.on_cpu(values):  # numpy's sort is vectorised
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)[:, ::-1].copy())
    return values.sort(dim=-1, descending=True).values
