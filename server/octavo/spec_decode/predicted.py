"""Predicted outputs: the client sends the text that the answer repeats in large part, as a file before an edit.

The answer is followed through that text: what stands where it is now is what comes next. Where the answer differs, it
is found again by its last two tokens, behind the place where it was lost if they stand there.
"""

from __future__ import annotations

from octavo.spec_decode.ngram import NgramDrafter
from octavo.spec_decode.places import MOST_MATCHING, Places, match_length
from octavo.spec_decode.suffix import SuffixDrafter

SHORTEST = 2  # tokens by which a place is found again
_EVIDENCE = 100  # above what other drafters say: what is learnt of these guesses is not said of those


class Prediction:
    """A text that an output may repeat, and where in it the output is."""

    __slots__ = ("_at", "_last", "_matching", "_places", "_text", "num_right")

    def __init__(self, token_ids: list[int]) -> None:
        self._text, self._places = token_ids, Places(SHORTEST)
        self._at = self._matching = 0  # the token that is expected, and how many before it have come as expected
        self._last: list[int] = []  # of the output
        self.num_right = 0  # tokens of the output that were expected

    @property
    def num_wrong(self) -> int:
        """Tokens of the text that the output has not repeated."""
        return len(self._text) - self.num_right

    def follow(self, token_ids: list[int]) -> None:
        """Read the next tokens of the output."""
        for token in token_ids:
            self._last = [*self._last[1 - MOST_MATCHING :], token]
            if self._at < len(self._text) and self._text[self._at] == token:
                self._at += 1
                self._matching += 1
                self.num_right = min(self.num_right + 1, len(self._text))
            else:
                self._matching = 0
                self._find()

    def _find(self) -> None:
        if len(self._last) < SHORTEST:
            return
        self._places.read(self._text)
        best: tuple[int, bool, int] | None = None
        for position in self._places.find(tuple(self._last[-SHORTEST:])):
            ahead, length = position >= self._at, match_length(self._text, position, self._last, MOST_MATCHING)
            found = length, ahead, -position if ahead else position  # the nearest one behind that place
            best = found if best is None or found > best else best
        if best is not None:
            self._matching, self._at = best[0], abs(best[2])

    def expected(self, most: int) -> list[int]:
        """The next ``most`` tokens of the text; none while the output is not in it."""
        return self._text[self._at : self._at + most] if self._matching else []

    def evidence(self, count: int) -> list[int]:
        """Evidence of so many expected tokens, see `octavo.core.spec_decode.drafts.WeighingDrafter`."""
        return [_EVIDENCE + min(self._matching + i, MOST_MATCHING) for i in range(count)]


class PredictionDrafter:
    """Proposes what predictions go on with; for sequences without one, or beside theirs, what another drafter does."""

    def __init__(self, other: NgramDrafter | SuffixDrafter | None) -> None:
        self._other = other
        self._followed: dict[str, tuple[Prediction, int]] = {}  # and the tokens of the sequence that are read
        self.evidence: list[int] = []  # see `octavo.core.spec_decode.drafts.WeighingDrafter`

    def start(self, req_id: str, scope: bytes, num_prompt_tokens: int) -> None:
        """See `octavo.core.spec_decode.drafts.Drafter`."""
        if self._other is not None:
            self._other.start(req_id, scope, num_prompt_tokens)

    def expect(self, req_id: str, token_ids: list[int], num_prompt_tokens: int) -> None:
        """See `octavo.core.spec_decode.drafts.ExpectingDrafter`."""
        self._followed[req_id] = Prediction(token_ids), num_prompt_tokens

    def propose(self, req_id: str, token_ids: list[int], most: int) -> list[int]:
        """See `octavo.core.spec_decode.drafts.Drafter`."""
        if req_id in self._followed:
            prediction, num_read = self._followed[req_id]
            prediction.follow(token_ids[num_read:])
            self._followed[req_id] = prediction, len(token_ids)
            if drafts := prediction.expected(most):
                self.evidence = prediction.evidence(len(drafts))
                return drafts
        if self._other is None:
            return []
        drafts = self._other.propose(req_id, token_ids, most)
        self.evidence = self._other.evidence
        return drafts

    def forget(self, req_id: str) -> None:
        """See `octavo.core.spec_decode.drafts.Drafter`."""
        self._followed.pop(req_id, None)
        if self._other is not None:
            self._other.forget(req_id)
