"""Text on which a grammar holds nothing, up to what may begin one of its marks. Pure.

A grammar says so by "free" beside its "grammars": {"texts": [...], "tokens": [...]}, its marks. From its start it lets
pass whatever text has no mark in it, so that it need be asked only from a token on in which a mark may begin, and no
longer once none has come of it. What is no text (special tokens, parts of characters, what follows on the end) is freer
than the grammar would have it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence

LONGEST_MARK = 64  # tokens: behind more, a mark has been said


class Spelling:
    """The texts of a vocabulary, in one."""

    def __init__(self, tokens: Iterable[bytes]) -> None:
        """``tokens``: in the order of their ids."""
        kept = [*tokens]
        self._text = b"".join(kept)
        self._ends = array("Q")
        for token in kept:
            self._ends.append(len(token) + (self._ends[-1] if self._ends else 0))

    def __getitem__(self, token_id: int) -> bytes:
        return self._text[self._ends[token_id - 1] if token_id else 0 : self._ends[token_id]]

    def with_byte(self, byte: bytes) -> set[int]:
        """Return the tokens in which ``byte`` stands."""
        found, at = set[int](), self._text.find(byte)
        while at >= 0:
            found.add(bisect_right(self._ends, at))
            at = self._text.find(byte, at + 1)
        return found


class FreeText:
    """Tells from where on a grammar is to be asked of a text, and how long."""

    def __init__(self, texts: Sequence[str], tokens: Sequence[int], spelling: Spelling) -> None:
        self._marks, self._tokens, self._spelling = [text.encode() for text in texts], frozenset(tokens), spelling
        self.wakers = self._tokens.union(*(spelling.with_byte(mark[:1]) for mark in self._marks))

    def allow(self, mask: bytes | bytearray) -> bool:
        """Wake by those tokens alone that ``mask``, a bit each, allows where the grammar starts: the others are special
        tokens, text like any. False: it forbids one that may be a part of a mark, and is to be asked of all texts."""
        forbidden = frozenset(token for token in self.wakers if not mask[token >> 3] >> (token & 7) & 1)
        self.wakers -= forbidden
        spelled = [self._spelling[token] for token in forbidden]
        begins_inside = any(text and 0x80 <= text[0] < 0xC0 for text in spelled)  # a character
        return not (
            self._tokens & forbidden or begins_inside or any(m in text for text in spelled for m in self._marks)
        )

    def is_free(self, token_ids: Sequence[int]) -> bool:
        """True if no mark stands in these tokens, nor the beginning of one at their end."""
        if not self._tokens.isdisjoint(token_ids):
            return False
        text = b"".join(map(self._spelling.__getitem__, token_ids))
        return not any(
            mark in text or any(text.endswith(mark[:length]) for length in range(1, len(mark))) for mark in self._marks
        )

    def since_woken(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens from the last one on from which the grammar is to be asked; none: the text is free."""
        woken: list[int] = []
        for token in token_ids:
            if woken or token in self.wakers:
                woken.append(token)
                if len(woken) <= LONGEST_MARK and self.is_free(woken):
                    woken = []
        return woken
