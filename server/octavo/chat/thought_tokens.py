"""Count the tokens of one answer's thoughts while they come. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence


class ThoughtTokens:
    """Counts tokens between tags that are tokens of their own; where they are not, those of the thoughts' text.

    ``inside``: the output begins inside the thoughts. ``openings``, ``closings``: ids of tags. ``encode`` gives the
    tokens of a text. ``again``: thoughts may come again behind the first ones.
    """

    def __init__(
        self,
        inside: bool,
        openings: Collection[int],
        closings: Collection[int],
        encode: Callable[[str], Sequence[int]],
        again: bool = False,
    ) -> None:
        self._openings, self._closings, self._encode = openings, closings, encode
        self._is_open, self._is_closed, self._count = inside, False, 0
        self._again, self._num_taken = again, 0
        self._texts: list[str] = []

    def take(self, token_ids: Sequence[int], thoughts: str) -> None:
        """Take new tokens of the answer, and the thoughts that have become certain by them."""
        if thoughts:
            self._texts.append(thoughts)
        self._num_taken += len(token_ids)
        for token_id in token_ids if self._closings else ():
            if self._is_closed and not self._again:
                return
            if self._is_open and token_id in self._closings:
                self._is_open, self._is_closed = False, True
            elif self._is_open:
                self._count += 1
            else:
                self._is_open = token_id in self._openings

    def total(self, goes_on: bool) -> int:
        """The number so far, no more than the answer's tokens. ``goes_on``: the answer has not left the thoughts."""
        if not self._texts:
            return 0
        if (self._is_closed and not self._is_open) or (goes_on and self._closings):
            return self._count
        return min(len(self._encode("".join(self._texts))), self._num_taken)
