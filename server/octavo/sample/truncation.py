"""Top-k, top-p (Holtzman et al. 2020) and min-p (Nguyen et al. 2024): which tokens stay in the draw.

The three are cuts of the distribution from the top, made in this order: min-p, top-k (every token as likely as the k-th
stays), top-p over what is left (the smallest set that reaches the mass; among equals the lower ids), never empty.

On the CPU a whole row is not sorted unless it must be: a floor is guessed, the tokens at or above it are looked at, and
when the cuts lie among them the answer is exact. A row's tokens are the same whichever guess succeeded.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.sample.candidates import LOWEST, block_floor, candidates
from octavo.sample.gumbel import GumbelNoise
from octavo.sample.metadata import RandomRows

_FIRST_LOOK = 128  # candidates of the first guess: most nuclei of a good model, and every usual top_k
_MASS_RANGE = 25.0  # nats below the best token where the second guess looks for the end of the nucleus
_MASS_STEPS = 7  # to 0.2 nats


def sample_truncated(scores: Tensor, rows: RandomRows, noise: GumbelNoise) -> Tensor:
    """Draw from the truncated softmax of ``scores`` (float32 [N, V], by temperature already): int64 [N]."""
    cuts = _Cuts.of(scores, rows)
    if scores.device.type != "cpu":
        return noise.argmax(scores.masked_fill(~cuts.keep(scores)[0], -torch.inf), rows.keys)
    sampled = torch.empty(len(scores), dtype=torch.int64)
    left = torch.arange(len(scores))
    for guess in (_first_floor, _second_floor):
        floor = guess(scores, cuts)
        values, ids = candidates(scores, floor)
        keep, done = cuts.keep(values, floor)
        draw = noise.noise(rows.keys[left], ids).add_(values).masked_fill_(~keep, -torch.inf)
        token = ids.gather(1, draw.argmax(-1, keepdim=True))[:, 0]
        sampled[left] = token  # for good in the rows that are done
        if bool(done.all()):
            return sampled
        left, scores, cuts = left[~done], scores[~done], cuts.of_rows(~done)
    sampled[left] = noise.argmax(scores.masked_fill(~cuts.keep(scores)[0], -torch.inf), rows.keys[left])
    return sampled


def _first_floor(scores: Tensor, cuts: _Cuts) -> Tensor:
    return block_floor(scores, _FIRST_LOOK)


def _second_floor(scores: Tensor, cuts: _Cuts) -> Tensor:
    """By the kind of cut: the min-p line, a floor under the k-th token, or one that holds the mass of top-p."""
    by_k = cuts.top_k < scores.shape[1]
    floor = torch.full((len(scores), 1), LOWEST)
    if bool(by_k.any()):
        floor = torch.where(by_k, block_floor(scores, int(cuts.top_k[by_k].max()))[:, None], floor)
    if bool(cuts.top_p_alone.any()):
        floor = torch.where(cuts.top_p_alone, _mass_floor(scores, cuts), floor)
    return torch.maximum(floor, cuts.min_p_line)[:, 0]


def _mass_floor(scores: Tensor, cuts: _Cuts) -> Tensor:
    """Bisect for the highest value (to 0.2 nats) above which the mass of top-p lies: [N, 1]."""
    probs = scores.softmax(-1)
    need = cuts.top_p.float() * (1 + 1e-5)
    high, low = cuts.best, cuts.best - _MASS_RANGE
    above = torch.empty_like(probs)  # 1.0 or 0.0: torch.where is much slower than a product
    for _ in range(_MASS_STEPS):
        middle = (high + low) / 2
        enough = torch.ge(scores, middle, out=above).mul_(probs).sum(-1, keepdim=True) >= need
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low


class _Cuts:
    """The limits of some rows; tensors [N, 1]."""

    def __init__(self, best: Tensor, mass: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, vocab: int) -> None:
        self.best, self.mass, self.top_k, self.top_p, self.min_p = best, mass, top_k, top_p, min_p
        self.vocab = vocab
        self.min_p_line = (best.double() + min_p.log()).float()
        self.top_p_alone = (top_k >= vocab) & (min_p == 0)

    @classmethod
    def of(cls, scores: Tensor, rows: RandomRows) -> _Cuts:
        assert rows.top_k is not None and rows.top_p is not None and rows.min_p is not None
        top_k, top_p, min_p = rows.top_k[:, None], rows.top_p[:, None], rows.min_p[:, None]
        best = scores.amax(-1, keepdim=True)
        # Mass of the whole row relative to its best token. Softmax reduces each row alone in a fixed order, whatever
        # the number of rows and threads; sum() does not. Only top-p needs it, and only without another cut before.
        if scores.device.type == "cpu" and not bool(((top_k >= scores.shape[1]) & (min_p == 0)).any()):
            mass = torch.ones_like(top_p)
        else:
            mass = scores.softmax(-1).amax(-1, keepdim=True).double().reciprocal_()
        return cls(best, mass, top_k, top_p, min_p, scores.shape[1])

    def of_rows(self, index: Tensor) -> _Cuts:
        mass, top_k, top_p, min_p = self.mass[index], self.top_k[index], self.top_p[index], self.min_p[index]
        return _Cuts(self.best[index], mass, top_k, top_p, min_p, self.vocab)

    def keep(self, values: Tensor, floor: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Which of ``values`` [N, C], by ascending id, stay; and for which rows [N] that is the whole answer.
        ``floor`` [N]: values holds every token of the row at or above it; None: it holds every token."""
        columns = values.shape[1]
        ordered = _sort_descending(values)
        if floor is None:
            complete = torch.ones_like(self.top_p_alone)
        else:
            complete = floor[:, None] <= LOWEST
        kth = ordered.gather(1, self.top_k.clamp(max=columns) - 1)
        cut = torch.maximum(self.min_p_line, torch.where(self.top_k > columns, -torch.inf, kth))
        cut_inside = complete if floor is None else complete | (cut >= floor[:, None])

        weight = (ordered.double() - self.best.double()).masked_fill_(ordered < cut, -torch.inf).exp_()
        reached = weight.cumsum(-1)
        need = self.top_p * torch.where(cut_inside, reached[:, -1:], self.mass)
        last = (reached < need).sum(-1, keepdim=True)
        inside = cut_inside | (self.top_p_alone & (last < columns))
        last = torch.minimum(last, (ordered >= cut).sum(-1, keepdim=True) - 1).clamp(min=0)
        boundary = ordered.gather(1, last)
        equals = last + 1 - (ordered > boundary).sum(-1, keepdim=True)  # how many of the boundary's equals stay
        equal = values == boundary
        nucleus = (values > boundary) | (equal & (equal.cumsum(-1) <= equals))
        keep = torch.where(self.top_p < 1, nucleus, values >= cut)
        return keep & (values > -torch.inf), inside[:, 0]


def _sort_descending(values: Tensor) -> Tensor:
    if values.device.type == "cpu":  # numpy's sort is vectorised
        return torch.from_numpy(np.ascontiguousarray(np.sort(values.numpy(), axis=-1)[:, ::-1]))
    return values.sort(dim=-1, descending=True).values
