"""Top-k, top-p (Holtzman et al. 2020) and min-p (Nguyen et al. 2024): which tokens stay in the draw.

The three are cuts of the distribution from the top, made in this order: min-p, top-k (every token as likely as the k-th
stays), top-p over what is left (the smallest set that reaches the mass; among equals the lower ids), never empty.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.sample.gumbel import GumbelNoise
from octavo.sample.metadata import RandomRows

_TIERS = (128, 1024)  # how many candidates to look at before sorting a whole row
_LOWEST = float(np.finfo(np.float32).min)


def sample_truncated(scores: Tensor, rows: RandomRows, noise: GumbelNoise) -> Tensor:
    """Draw from the truncated softmax of ``scores`` (float32 [N, V], by temperature already): int64 [N]."""
    cuts = _Cuts.of(scores, rows)
    if scores.device.type != "cpu":
        return noise.argmax(scores.masked_fill(~cuts.keep(scores)[0], -torch.inf), rows.keys)
    sampled = torch.zeros(len(scores), dtype=torch.int64)
    left = torch.arange(len(scores))
    for size in _TIERS:
        if size * 8 > scores.shape[1]:
            break
        some = scores if len(left) == len(scores) else scores[left]
        values, ids, floor = candidates(some, size)
        part = cuts.of_rows(left)
        keep, done = part.keep(values, floor)
        draw = torch.where(keep, values.double() + noise.noise(rows.keys[left], ids), -torch.inf)
        token = ids.gather(1, draw.argmax(-1, keepdim=True))[:, 0]
        sampled[left[done]] = token[done]
        left = left[~done]
        if not len(left):
            return sampled
    some = scores[left]
    keep, _ = cuts.of_rows(left).keep(some)
    sampled[left] = noise.argmax(some.masked_fill_(~keep, -torch.inf), rows.keys[left])
    return sampled


def candidates(scores: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """About ``size`` or more of each row's best tokens, by ascending id: values [N, C] (padded with -inf), ids [N, C],
    and a floor [N]: every token at or above it is there.

    The ``size``-th best of the maxima of blocks is such a floor, and much cheaper than the ``size``-th best token.
    """
    n, vocab = scores.shape
    width = max(8, vocab // (size * 6))
    whole = vocab - vocab % width
    maxima = scores[:, :whole].view(n, -1, width).amax(-1).numpy()
    if whole < vocab:
        maxima = np.concatenate((maxima, scores[:, whole:].amax(-1, keepdim=True).numpy()), 1)
    floor = np.maximum(np.partition(maxima, -size, axis=-1)[:, -size], _LOWEST)
    source = scores.numpy()
    rows, ids = np.divmod(np.flatnonzero(source >= floor[:, None]), vocab)
    counts = np.bincount(rows, minlength=n)
    column = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    values = np.full((n, max(1, counts.max())), -np.inf, dtype=np.float32)
    values[rows, column] = source[rows, ids]
    padded_ids = np.zeros(values.shape, dtype=np.int64)
    padded_ids[rows, column] = ids
    return torch.from_numpy(values), torch.from_numpy(padded_ids), torch.from_numpy(floor)


class _Cuts:
    """The limits of some rows, all [N, 1]."""

    def __init__(self, best: Tensor, mass: Tensor | None, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
        self.best, self.mass, self.top_k, self.top_p, self.min_p = best, mass, top_k, top_p, min_p

    @classmethod
    def of(cls, scores: Tensor, rows: RandomRows) -> _Cuts:
        assert rows.top_k is not None and rows.top_p is not None and rows.min_p is not None
        best = scores.amax(-1, keepdim=True)
        # Mass of the whole row relative to its best token. Softmax reduces each row alone in a fixed order, whatever
        # the number of rows and threads; sum() does not.
        mass = scores.softmax(-1).amax(-1, keepdim=True).double().reciprocal_()
        return cls(best, mass, rows.top_k[:, None], rows.top_p[:, None], rows.min_p[:, None])

    def of_rows(self, index: Tensor) -> _Cuts:
        if len(index) == len(self.best):
            return self
        mass = None if self.mass is None else self.mass[index]
        return _Cuts(self.best[index], mass, self.top_k[index], self.top_p[index], self.min_p[index])

    def keep(self, values: Tensor, floor: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Which of ``values`` [N, C] stay, and for which rows [N] that is the whole answer. ``floor`` [N]: values holds
        every token of the row at or above it; None: every token."""
        n, columns = values.shape
        ordered = _sort_descending(values)
        complete = torch.ones(n, 1, dtype=torch.bool, device=values.device)
        if floor is not None:
            complete = floor[:, None] <= _LOWEST
        kth = ordered.gather(1, self.top_k.clamp(max=columns) - 1)
        by_min_p = (self.best.double() + self.min_p.log()).float()
        cut = torch.maximum(kth, by_min_p)
        cut = torch.where(self.top_k > columns, by_min_p, cut)
        cut_inside = complete if floor is None else complete | (cut >= floor[:, None])

        weight = (ordered.double() - self.best.double()).exp()
        weight = torch.where(ordered >= cut, weight, 0.0)
        reached = weight.cumsum(-1)
        mass = torch.where(cut_inside, reached[:, -1:], self.mass)
        last = (reached < self.top_p * mass).sum(-1, keepdim=True)
        p_inside = last < columns
        last = torch.minimum(last.clamp(max=columns - 1), (ordered >= cut).sum(-1, keepdim=True).clamp(min=1) - 1)
        boundary = ordered.gather(1, last)
        equals = last + 1 - (ordered > boundary).sum(-1, keepdim=True)
        equal = values == boundary
        by_mass = (values > boundary) | (equal & (equal.cumsum(-1) <= equals))
        use_p = self.top_p < 1
        keep = torch.where(use_p, by_mass, values >= cut)
        done = cut_inside | (use_p & p_inside)
        return keep & (values > -torch.inf), done[:, 0]


def _sort_descending(values: Tensor) -> Tensor:
    if values.device.type == "cpu":
        return torch.from_numpy(np.ascontiguousarray(np.sort(values.numpy(), axis=-1)[:, ::-1]))
    return values.sort(dim=-1, descending=True).values
