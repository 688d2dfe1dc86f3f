"""Tell a marker that is one token from text that merely spells it. Pure.

A model writes the markers of its calls and thoughts as tokens of their own, where the vocabulary has them. Text in
which the same letters come as other tokens is a quotation: of a file, or of the user. Readers see letters alone, so a
quotation is broken up for them by a character that no text has, and joined again behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

BREAK = "\ufdd0"  # a code point that Unicode reserves for uses inside of a program


class SpelledMarkers:
    """Follows one answer. ``tokens``: markers with their ids; ``decode`` gives the text of ids, markers included.

    A marker at the beginning of a line counts though it is spelled, as small models spell them.
    """

    def __init__(self, tokens: Mapping[str, int], decode: Callable[[Sequence[int]], str]) -> None:
        self._tokens, self._decode = tokens, decode
        self._longest = max(map(len, tokens), default=0)
        self._ids: list[int] = []
        self._seen = dict.fromkeys(tokens, 0)  # occurrences so far
        self._told: dict[str, tuple[list[bool], int]] = {marker: ([], 0) for marker in tokens}  # `_kinds` up to an id
        self._line = ""  # the end of the text so far, from the beginning of the line or as far back as a marker reaches
        self._blank = True  # the line has only space in front of it

    def broken(self, text: str, token_ids: Sequence[int]) -> str:
        """The next piece of text, and the tokens that came with it; spelled markers that end in it are broken up."""
        self._ids += token_ids
        if not self._tokens or not text:
            return text
        known, whole = len(self._line), self._line + text
        cuts = []
        for marker in self._tokens:
            at = whole.find(marker, max(0, known - len(marker) + 1))
            while at >= 0:
                kinds, number = self._kinds(marker), self._seen[marker]
                self._seen[marker] += 1
                if number < len(kinds) and not kinds[number] and not self._begins_line(whole, at):
                    cuts.append(at + len(marker) - 1)
                at = whole.find(marker, at + len(marker))
        self._keep(whole)
        for cut in sorted(cuts, reverse=True):
            whole = whole[:cut] + BREAK + whole[cut:]
        return whole[known:]

    def _kinds(self, marker: str) -> list[bool]:
        """Tell of each occurrence of a marker so far whether it is a token. Text before the last one that is a token is
        read once."""
        number = self._tokens[marker]
        kinds, begin = self._told[marker]
        while number in self._ids[begin:]:
            at = self._ids.index(number, begin)
            kinds += [*self._spelled(marker, begin, at), True]
            begin = at + 1
        self._told[marker] = kinds, begin
        return kinds + self._spelled(marker, begin, len(self._ids))

    def _spelled(self, marker: str, begin: int, end: int) -> list[bool]:
        return [False] * self._decode(self._ids[begin:end]).count(marker) if end > begin else []

    def _begins_line(self, text: str, at: int) -> bool:
        before = text[:at].rpartition("\n")
        return not before[2].strip() and (bool(before[1]) or self._blank)

    def _keep(self, text: str) -> None:
        """Keep the end of the text in which a marker may have begun."""
        cut = max(0, len(text) - self._longest + 1)
        dropped = text[:cut].rpartition("\n")
        self._blank = not dropped[2].strip() and (bool(dropped[1]) or self._blank)
        self._line = text[cut:]


def joined(text: str) -> str:
    """A text that readers gave out, without the breaks."""
    return text.replace(BREAK, "") if BREAK in text else text
