"""Count the tokens of one answer's thoughts while they come. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence


class ThoughtTokens:
    """Counts tokens between tags that are tokens of their own; where they are not, those of the thoughts' text.

    ``inside``: the output begins inside the thoughts. ``openings``, ``closings``: ids of tags. ``encode`` gives the
    tokens of a text.
    """

    def __init__(
        self,
        inside: bool,
        openings: Collection[int],
        closings: Collection[int],
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        self._openings, self._closings, self._encode = openings, closings, encode
        self._is_open, self._is_closed, self._count = inside, False, 0
        self._texts: list[str] = []

    def take(self, token_ids: Sequence[int], thoughts: str) -> None:
        """Take new tokens of the answer, and the thoughts that have become certain by them."""
        if thoughts:
            self._texts.append(thoughts)
        if self._is_closed or not self._closings:
            return
        for token_id in token_ids:
            if self._is_open and token_id in self._closings:
                self._is_closed = True
                return
            if self._is_open:
                self._count += 1
            self._is_open = self._is_open or token_id in self._openings

    def total(self, goes_on: bool) -> int:
        """The number so far. ``goes_on``: the answer has not left the thoughts."""
        if not self._texts:
            return 0
        if self._is_closed or (goes_on and self._closings):
            return self._count
        return len(self._encode("".join(self._texts)))
