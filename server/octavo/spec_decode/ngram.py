"""Prompt lookup: the last tokens have stood somewhere before, and what followed them there may follow again.

As in transformers and vLLM (Saxena, "Prompt Lookup Decoding", 2023). It pays where answers repeat their prompts:
summaries, edits, answers from documents, code.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Tokens that one call reads, so that a long prompt holds up no step for long; what it has not read is not found yet.
MAX_TOKENS_PER_CALL = 8192
# Places that are compared, the latest first, to find where the longest end stood before.
MAX_PLACES = 16


@dataclass(slots=True)
class _Index:
    """The places of a sequence's n-grams of the shortest length, each by the position of the token after it."""

    last: dict[tuple[int, ...], int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)  # position: the one before it of the same n-gram
    num_read: int = 0


class NgramDrafter:
    """Finds the longest end of a sequence, of ``longest`` to ``shortest`` tokens, that it has already had, and proposes
    what followed; of several places the latest."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._indexes: dict[str, _Index] = {}

    def propose(self, req_id: str, token_ids: list[int], most: int) -> list[int]:
        """See `octavo.core.drafts.Drafter`."""
        index = self._indexes.get(req_id)
        if index is None:
            index = self._indexes[req_id] = _Index()
        self._read(index, token_ids)
        position = index.last.get(tuple(token_ids[-self._shortest :]))
        best, best_length, places = None, 0, 0
        while position is not None and places < MAX_PLACES:
            length = self._match_length(token_ids, position)
            if length > best_length:
                best, best_length = position, length
            if length >= self._longest:
                break
            position = index.before.get(position)
            places += 1
        if best is None:
            return []
        # What follows is read round and round where it reaches the end: a sequence that repeats itself goes on to.
        period = len(token_ids) - best
        return [token_ids[best + i % period] for i in range(most)]

    def forget(self, req_id: str) -> None:
        """See `octavo.core.drafts.Drafter`."""
        self._indexes.pop(req_id, None)

    def _read(self, index: _Index, token_ids: list[int]) -> None:
        """Note the n-grams that a token follows."""
        n, start = self._shortest, max(index.num_read, self._shortest)
        end = min(len(token_ids), start + MAX_TOKENS_PER_CALL)
        last, before = index.last, index.before
        for position in range(start, end):
            key = tuple(token_ids[position - n : position])
            earlier = last.get(key)
            if earlier is not None:
                before[position] = earlier
            last[key] = position
        index.num_read = max(end, index.num_read)

    def _match_length(self, token_ids: list[int], position: int) -> int:
        """How many tokens before ``position`` are those at the end, up to the longest that is looked for."""
        length, most = self._shortest, min(self._longest, position)
        while length < most and token_ids[position - 1 - length] == token_ids[-1 - length]:
            length += 1
        return length
