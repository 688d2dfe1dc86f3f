"""Prompt lookup: the last tokens have stood somewhere before, and what followed them there may follow again.

As in transformers and vLLM (Saxena, "Prompt Lookup Decoding", 2023). It pays where answers repeat their prompts:
summaries, edits, answers from documents, code.
"""

from __future__ import annotations

from octavo.spec_decode.places import Places, match_length


class NgramDrafter:
    """Finds the longest end of a sequence, of ``longest`` to ``shortest`` tokens, that it has already had, and proposes
    what followed; of several places the latest."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._places: dict[str, Places] = {}

    def start(self, req_id: str, scope: bytes, num_prompt_tokens: int) -> None:
        """See `octavo.core.drafts.Drafter`."""
        self._places[req_id] = Places(self._shortest)

    def propose(self, req_id: str, token_ids: list[int], most: int) -> list[int]:
        """See `octavo.core.drafts.Drafter`."""
        places = self._places[req_id]
        places.read(token_ids)
        best, best_length = None, 0
        for position in places.find(tuple(token_ids[-self._shortest :])):
            length = match_length(token_ids, position, token_ids, self._longest)
            if length > best_length:
                best, best_length = position, length
            if length >= self._longest:
                break
        if best is None:
            return []
        # What follows is read round and round where it reaches the end: a sequence that repeats itself goes on to.
        period = len(token_ids) - best
        return [token_ids[best + i % period] for i in range(most)]

    def forget(self, req_id: str) -> None:
        """See `octavo.core.drafts.Drafter`."""
        self._places.pop(req_id, None)
