"""Statistics of which token follows which, and the probability that makes a guess: counts of pairs under those of
longer matches."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from octavo.spec_decode.places import MAX_TOKENS_PER_CALL, MOST_MATCHING

# Guesses are told apart by how probable they seem: in steps of 0.8 of log odds, from 10 % to 98.5 %.
_STEPS = [1 / (1 + math.exp(2.2 - 0.8 * i)) for i in range(9)]


class Followers:
    """The tokens that have stood after each token of a text, by how often."""

    __slots__ = ("_counts", "_most", "_num_read", "_totals")

    def __init__(self) -> None:
        self._num_read = 1
        self._counts: dict[int, dict[int, int]] = {}
        self._totals: dict[int, int] = {}
        self._most: dict[int, int] = {}

    def read(self, token_ids: list[int]) -> None:
        """Count the pairs of what was read before, and more; negative numbers are no tokens. As `Places.read`, at most
        `MAX_TOKENS_PER_CALL` at a time."""
        counts, totals, most = self._counts, self._totals, self._most
        end = min(len(token_ids), self._num_read + MAX_TOKENS_PER_CALL)
        for token, following in pairwise(token_ids[self._num_read - 1 : end]):
            if token < 0 or following < 0:
                continue
            of_token = counts.get(token)
            if of_token is None:
                counts[token], totals[token], most[token] = {following: 1}, 1, following
                continue
            of_token[following] = count = of_token.get(following, 0) + 1
            totals[token] += 1
            if count >= of_token[most[token]]:
                most[token] = following
        self._num_read = max(end, self._num_read)

    def after(self, token: int) -> tuple[dict[int, int], int, int] | None:
        """Counts of the tokens that have followed ``token``, their sum, and the most frequent one, the latest among
        equals; None: no token has."""
        of_token = self._counts.get(token)
        return None if of_token is None else (of_token, self._totals[token], self._most[token])


class Guess(NamedTuple):
    """A token that may follow."""

    token: int
    prob: float  # as it seems from matches of all lengths
    share: float  # of the longest matches, those that it has followed


def most_probable(token: int, nexts: Sequence[tuple[int, int]], followers: Sequence[Followers]) -> Guess | None:
    """The most probable one to follow ``token``; None: nothing is known.

    ``nexts``: what has followed in places where more than that one token matched, each with the number of those that
    did. Counts of longer matches are believed as far as they have been seen, else those of shorter ones, down to pairs
    (Witten and Bell, "The zero-frequency problem", 1991; method C)."""
    probs: dict[int, float] = dict.fromkeys([following for following, _ in nexts], 0.0)
    total = kinds = 0
    tables: list[dict[int, int]] = []
    for text in followers:
        after = text.after(token)
        if after is not None:
            counts, number, most_often = after
            tables.append(counts)
            probs[most_often] = 0.0
            total, kinds = total + number, kinds + len(counts)
    if not probs:
        return None
    if tables:
        for following in probs:
            probs[following] = sum([counts.get(following, 0) for counts in tables]) / (total + kinds)
    here: list[int] = []
    for length in sorted({min(length, MOST_MATCHING) for _, length in nexts}):
        here = [following for following, matching in nexts if matching >= length]
        different = set(here)
        rest = len(different) / (len(here) + len(different))
        for following in probs:
            probs[following] *= rest
        for following in different:
            probs[following] += (1 - rest) * here.count(following) / len(here)
    best = max(probs, key=probs.__getitem__)
    if here:
        return Guess(best, probs[best], here.count(best) / len(here))
    return Guess(best, probs[best], probs[best] * (total + kinds) / total)


def evidence_of(prob: float) -> int:
    """A number for guesses that seem about so probable, see `octavo.core.spec_decode.drafts.WeighingDrafter`."""
    return 1 + bisect(_STEPS, prob)
