"""Find where the last tokens of a text have stood before: at once, in memory bounded by the text."""

from __future__ import annotations

from collections.abc import Iterator

# Tokens that one call reads, so that a long prompt holds up no step for long; what it has not read is not found yet.
MAX_TOKENS_PER_CALL = 8192
# Places that are compared, the latest first, to find where the longest end stood before.
MAX_PLACES = 16
# Tokens of a match; with more of them what followed is not seen again more often.
MOST_MATCHING = 8


class Places:
    """The places of a text's n-grams of one length, each by the position of the token after it."""

    __slots__ = ("_before", "_last", "_n", "_num_read")

    def __init__(self, n: int) -> None:
        self._n = self._num_read = n
        self._last: dict[tuple[int, ...], int] = {}
        self._before: dict[int, int] = {}  # position: the one before it of the same n-gram

    def read(self, token_ids: list[int]) -> None:
        """Note the n-grams that a token follows. ``token_ids``: what was read before, and more."""
        n, last, before = self._n, self._last, self._before
        end = min(len(token_ids), self._num_read + MAX_TOKENS_PER_CALL)
        for position in range(self._num_read, end):
            key = tuple(token_ids[position - n : position])
            earlier = last.get(key)
            if earlier is not None:
                before[position] = earlier
            last[key] = position
        self._num_read = max(end, self._num_read)

    def find(self, end: tuple[int, ...]) -> Iterator[int]:
        """Positions of what followed the n-gram ``end``, the latest first, at most `MAX_PLACES`."""
        position = self._last.get(end)
        for _ in range(MAX_PLACES):
            if position is None:
                return
            yield position
            position = self._before.get(position)


def match_length(text: list[int], position: int, end: list[int], most: int) -> int:
    """Count the tokens before ``position`` of ``text`` that equal the last ones of ``end``, at most ``most``."""
    length, most = 0, min(most, position, len(end))
    while length < most and text[position - 1 - length] == end[-1 - length]:
        length += 1
    return length


def evidence(length: int, others: int, agreeing: int) -> int:
    """Evidence of a guess as a number (`octavo.core.spec_decode.drafts.WeighingDrafter`): how many tokens match before,
    and whether none of the ``others`` places where as many do, or one less, has another token next, or some do."""
    seen = 1 if not others else 2 if agreeing == others else 0
    return 1 + seen + 3 * min(length, MOST_MATCHING)
