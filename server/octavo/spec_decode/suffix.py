"""Suffix decoding: what has followed the end of the text most often, in the sequence itself and in recent answers.

After Oliaro et al., "SuffixDecoding" (2024), with vLLM's names. It pays where answers resemble each other: agents,
loops, many requests for one kind of document. How much is guessed follows from how long the matches are and how often
they agree. Without a match of two tokens, the most frequent successor of the last one is guessed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from octavo.spec_decode.followers import Followers, evidence_of, most_probable
from octavo.spec_decode.places import Places, match_length

SHORTEST = 2  # tokens of a match
MAX_STORED_TOKENS = 1 << 16  # of recent answers, over all scopes
_BETWEEN = -1  # no token: no match goes from one answer into the next


@dataclass(slots=True)
class _Text:
    token_ids: list[int] = field(default_factory=list)
    places: Places = field(default_factory=lambda: Places(SHORTEST))
    followers: Followers = field(default_factory=Followers)
    num_answers: int = 0

    def read(self) -> None:
        """Look at what the text has gained."""
        self.places.read(self.token_ids)
        self.followers.read(self.token_ids)


@dataclass(slots=True)
class _Sequence:
    scope: bytes
    num_prompt_tokens: int
    text: _Text = field(default_factory=_Text)  # its tokens are the caller's list, which grows


class RecentAnswers:
    """Ended sequences' outputs by scope. The older half of a scope's makes room, or the scope that ended one first."""

    def __init__(self, max_tokens: int, max_answers: int) -> None:
        self._max_tokens, self._max_answers = max_tokens, max_answers
        self._scopes: OrderedDict[bytes, list[_Text]] = OrderedDict()  # each: the newer half, the older one
        self.num_tokens = 0  # kept

    def add(self, scope: bytes, token_ids: list[int]) -> None:
        """Keep an answer, the last part of one that is too long."""
        halves = self._scopes.setdefault(scope, [_Text(), _Text()])
        self._scopes.move_to_end(scope)
        half = self._max_tokens // 2
        token_ids = token_ids[-(half - 1) :]
        text = halves[0]
        if len(text.token_ids) + len(token_ids) + 1 > half or text.num_answers >= -(-self._max_answers // 2):
            self.num_tokens -= len(halves[1].token_ids)
            halves[:] = [_Text(), text]
            text = halves[0]
        text.token_ids += [*token_ids, _BETWEEN]
        self.num_tokens += len(token_ids) + 1
        text.num_answers += 1
        text.read()
        while self.num_tokens > self._max_tokens:
            _, dropped = self._scopes.popitem(last=False)
            self.num_tokens -= sum(len(text.token_ids) for text in dropped)

    def texts(self, scope: bytes) -> list[_Text]:
        """The scope's texts, the newer half first; empty halves are left out."""
        return [text for text in self._scopes.get(scope, ()) if text.token_ids]


class SuffixDrafter:
    """Follows the longest matches of a sequence's end token by token, as long as the places agree well enough."""

    def __init__(self, max_depth: int, max_answers: int, max_spec_factor: float, min_token_prob: float) -> None:
        """``max_depth``: tokens of a match that count; ``max_answers``: kept in a scope, 0 for none;
        ``max_spec_factor``: tokens guessed for each token that matches; ``min_token_prob``: of a whole guess, by
        counts."""
        self._max_depth, self._factor, self._min_prob = max_depth, max_spec_factor, min_token_prob
        self.recent = RecentAnswers(MAX_STORED_TOKENS, max_answers) if max_answers else None
        self._sequences: dict[str, _Sequence] = {}
        self.evidence: list[int] = []  # see `octavo.core.spec_decode.drafts.WeighingDrafter`

    def start(self, req_id: str, scope: bytes, num_prompt_tokens: int) -> None:
        """See `octavo.core.spec_decode.drafts.Drafter`."""
        self._sequences[req_id] = _Sequence(scope, num_prompt_tokens)

    def propose(self, req_id: str, token_ids: list[int], most: int) -> list[int]:
        """See `octavo.core.spec_decode.drafts.Drafter`."""
        sequence = self._sequences[req_id]
        own = sequence.text
        own.token_ids = token_ids
        own.read()
        texts = [own] if self.recent is None else [own, *self.recent.texts(sequence.scope)]
        end, longest, found = tuple(token_ids[-SHORTEST:]), 1, list[tuple[_Text, int, int]]()
        for text in texts:
            for position in text.places.find(end):
                length = match_length(text.token_ids, position, token_ids, self._max_depth)
                longest = max(longest, length)
                found.append((text, position, length))
        followers = [text.followers for text in texts]
        return self._follow(found, followers, min(most, int(self._factor * longest)), token_ids)

    def _follow(
        self, found: list[tuple[_Text, int, int]], followers: list[Followers], most: int, own: list[int]
    ) -> list[int]:
        """The most probable token, then what is after it where it stands in those places, and so on. ``found``: text,
        position and length of each match."""
        drafts: list[int] = []
        self.evidence = []
        prob, last = 1.0, own[-1]
        while len(drafts) < most:
            offset = len(drafts)
            nexts = [(self._next(text, position, offset, own), length + offset) for text, position, length in found]
            guess = most_probable(last, [place for place in nexts if place[0] != _BETWEEN], followers)
            if guess is None:
                break
            prob *= guess.share
            if prob < self._min_prob:
                break
            self.evidence.append(evidence_of(guess.prob))
            drafts.append(guess.token)
            found = [place for place, following in zip(found, nexts, strict=True) if following[0] == guess.token]
            last = guess.token
        return drafts

    @staticmethod
    def _next(of: _Text, position: int, offset: int, own: list[int]) -> int:
        """The sequence's own end is followed by what followed there: one that repeats itself goes on to."""
        text = of.token_ids
        if text is own:
            return text[position + offset % (len(text) - position)]
        # A place within an answer that has ended: nothing more is known there.
        return text[position + offset] if position + offset < len(text) else _BETWEEN

    def forget(self, req_id: str) -> None:
        """See `octavo.core.spec_decode.drafts.Drafter`."""
        sequence = self._sequences.pop(req_id, None)
        if sequence is not None and self.recent is not None and sequence.text.token_ids:
            self.recent.add(sequence.scope, sequence.text.token_ids[sequence.num_prompt_tokens :])
