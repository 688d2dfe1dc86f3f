"""Prompt lookup: the last tokens have stood somewhere before, and what followed them there may follow again.

As in transformers and vLLM (Saxena, "Prompt Lookup Decoding", 2023). It pays where answers repeat their prompts:
summaries, edits, answers from documents, code.
"""

from __future__ import annotations

from octavo.spec_decode.places import MOST_MATCHING, Places, evidence, match_length


class NgramDrafter:
    """Finds the longest end of a sequence, of ``longest`` to ``shortest`` tokens, that it has already had, and proposes
    what followed; of several places the latest."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._places: dict[str, Places] = {}
        self.evidence: list[int] = []  # see `octavo.core.spec_decode.drafts.WeighingDrafter`

    def start(self, req_id: str, scope: bytes, num_prompt_tokens: int) -> None:
        """See `octavo.core.spec_decode.drafts.Drafter`."""
        self._places[req_id] = Places(self._shortest)

    def propose(self, req_id: str, token_ids: list[int], most: int) -> list[int]:
        """See `octavo.core.spec_decode.drafts.Drafter`."""
        places, found = self._places[req_id], list[tuple[int, int]]()
        places.read(token_ids)
        best = best_length = 0
        for position in places.find(tuple(token_ids[-self._shortest :])):
            length = match_length(token_ids, position, token_ids, max(self._longest, MOST_MATCHING))
            if min(length, self._longest) > min(best_length, self._longest):
                best, best_length = position, length
            found.append((position, length))
        self.evidence = []
        if not best:
            return []
        others = [position for position, length in found if length + 1 >= best_length and position != best]
        return self._follow(token_ids, best, best_length, others, most)

    def _follow(self, text: list[int], best: int, length: int, others: list[int], most: int) -> list[int]:
        """Read the tokens after ``best``, round and round where it reaches the end: a sequence that repeats itself goes
        on to. The ``others`` count as evidence for as long as they agree."""
        end, drafts = len(text), list[int]()
        for i in range(most):
            token = text[best + i % (end - best)]
            agreeing = [position for position in others if text[position + i % (end - position)] == token]
            self.evidence.append(evidence(length + i, len(others), len(agreeing)))
            others = agreeing
            drafts.append(token)
        return drafts

    def forget(self, req_id: str) -> None:
        """See `octavo.core.spec_decode.drafts.Drafter`."""
        self._places.pop(req_id, None)
