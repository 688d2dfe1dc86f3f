"""Samplers of llama.cpp that shape a row's distribution: DRY, XTC and top-n-sigma. Pure but for the logits in place.

DRY (p-e-w, 2024): where the text's end stood before, the token after it there loses the more, the longer the match.
XTC (p-e-w, 2024): at times, of all tokens that are likely enough only the least likely one stays.
Top-n-sigma (Tang et al., 2024): tokens stay whose logit is within n standard deviations of the best.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.sample import devices
from octavo.sample.token_pool import TokenPool

_MAX_EXPONENT = 80.0  # of e: a penalty is a float32, and forbids no token
_MOST_MATCHING = 1024  # tokens of a match that count


@dataclass
class Repetition:
    """The DRY parameters of a request. ``breakers`` bool [V]: tokens that no match goes over; ``sequences`` int64:
    several of them in a row that none does; ``last_n``: tokens that are looked at, -1: all."""

    multiplier: float
    base: float
    allowed_length: int
    last_n: int
    breakers: Tensor
    sequences: list[Tensor]

    @property
    def longest(self) -> int:
        """Tokens of a match beyond which nothing changes."""
        growth = math.log(self.base)
        beyond = math.ceil(_MAX_EXPONENT / growth) if growth > 0 else 0
        return min(max(1, self.allowed_length) + beyond, _MOST_MATCHING)


@dataclass
class RepeatedRow:
    """A row of a step with DRY. ``position``: of the token to be sampled; ``slot``: of the token history."""

    row: int
    slot: int
    position: int
    repetition: Repetition


def match_lengths(tokens: Tensor, is_end: Tensor, longest: int) -> Tensor:
    """Count how many tokens in front of each of ``tokens`` int64 [n] but the first equal the last ones of all: int64
    [n - 1]; at most ``longest``, and none over the last place of ``is_end`` bool [n]."""
    count = len(tokens)
    places = torch.arange(1, count + 1, device=tokens.device)
    room = count - (is_end * places).amax()  # tokens behind the last breaker
    lengths = torch.zeros(count - 1, dtype=torch.int64, device=tokens.device)
    alive = torch.ones(count - 1, dtype=torch.bool, device=tokens.device)
    for behind in range(min(longest, count - 1)):
        alive[:behind] = False
        alive[behind:] &= (tokens[: count - 1 - behind] == tokens[count - 1 - behind]) & (behind < room)
        if devices.on_cpu(tokens) and not bool(alive.any()):
            break
        lengths += alive
    return lengths


def ends_of(tokens: Tensor, repetition: Repetition) -> Tensor:
    """The places bool [n] at which a breaker ends."""
    found = repetition.breakers[tokens]
    for sequence in repetition.sequences:
        size = len(sequence)
        if size <= len(tokens):
            found[size - 1 :] |= (tokens.unfold(0, size, 1) == sequence).all(-1)
    return found


def apply_repetition(logits: Tensor, rows: list[RepeatedRow], pool: TokenPool) -> None:
    """DRY: lower what would repeat the text, in float32 [R, V] in place."""
    for one in rows:
        dry = one.repetition
        start = 0 if dry.last_n < 0 else max(0, one.position - dry.last_n)
        tokens = pool.history[one.slot, start : one.position].long()
        if len(tokens) <= max(1, dry.allowed_length):
            continue
        lengths = match_lengths(tokens, ends_of(tokens, dry), dry.longest)
        longest = torch.zeros(logits.shape[1], dtype=torch.int64, device=logits.device)
        longest.scatter_reduce_(0, tokens[1:], lengths, "amax")
        least = max(1, dry.allowed_length)  # without a match there is no repetition
        exponent = ((longest - dry.allowed_length) * math.log(dry.base)).clamp(max=_MAX_EXPONENT)
        logits[one.row] -= torch.where(longest >= least, dry.multiplier * exponent.exp(), 0.0)


def apply_sigma(logits: Tensor, rows: Tensor, widths: Tensor) -> None:
    """Top-n-sigma: forbid what is more than ``widths`` float32 [N, 1] standard deviations below the best token."""
    some = logits[rows]
    known = torch.isfinite(some)
    count = known.sum(-1, keepdim=True).clamp(min=1)
    values = some.masked_fill(~known, 0.0).double()
    mean = values.sum(-1, keepdim=True) / count
    variance = ((values - mean) ** 2).masked_fill(~known, 0.0).sum(-1, keepdim=True) / count
    line = some.amax(-1, keepdim=True).double() - widths.double() * variance.sqrt()
    logits[rows] = some.masked_fill(some.double() < line, -torch.inf)


def without_top_choices(logits: Tensor, keep: Tensor, thresholds: Tensor, applies: Tensor) -> Tensor:
    """XTC: ``keep`` bool [N, V] without the tokens that have at least the threshold's share of those that stay, but the
    least likely of them (among equals the highest id), in the rows bool [N] where it ``applies``. ``logits`` [N, V]
    are before temperature, ``thresholds`` float32 [N, 1]."""
    shares = logits.masked_fill(~keep, -torch.inf).softmax(-1)
    above = keep & (shares >= thresholds)
    least = shares.masked_fill(~above, torch.inf).amin(-1, keepdim=True)
    ids = torch.arange(logits.shape[1], device=logits.device)
    last = torch.where(above & (shares == least), ids, -1).amax(-1, keepdim=True)
    return keep & ~(above & (ids != last) & applies[:, None])
