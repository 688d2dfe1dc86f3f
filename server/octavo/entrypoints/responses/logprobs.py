"""Finds the tokens that the texts of an answer consist of, for their log-probabilities. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.entrypoints.generation.logprobs import ChatLogprob


class TextLogprobs:
    """Tokens come as they are generated, texts as the parser releases them; both in the order of the answer."""

    def __init__(self) -> None:
        self._waiting: list[ChatLogprob] = []
        self._rest = b""  # of a token whose beginning is in an earlier text

    def add(self, tokens: Iterable[ChatLogprob]) -> None:
        """New tokens, without those that have no text."""
        self._waiting += tokens

    def take(self, text: str) -> list[ChatLogprob]:
        """The tokens that begin in ``text``. Those before it are dropped: tags, for example."""
        wanted = text.encode("utf-8", "surrogatepass")
        pieces = [bytes(token.bytes or ()) for token in self._waiting]
        at = (self._rest + b"".join(pieces)).find(wanted)
        # A text that is not found has bytes that are no UTF-8: it is all that has come.
        end = len(self._rest) + sum(map(len, pieces)) if at < 0 else at + len(wanted)
        taken: list[ChatLogprob] = []
        position, count = len(self._rest), 0
        for token, piece in zip(self._waiting, pieces, strict=True):
            if position >= end:
                break
            if position + len(piece) > at:
                taken.append(token)
            position += len(piece)
            count += 1
        last = pieces[count - 1] if count else self._rest
        self._rest = last[len(last) - (position - end) :] if position > end else b""
        self._waiting = self._waiting[count:]
        return taken
