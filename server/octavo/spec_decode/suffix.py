"""Suffix decoding: what has followed the end of the text most often, in the sequence itself and in recent answers.

After Oliaro et al., "SuffixDecoding" (2024), with vLLM's names. It pays where answers resemble each other: agents,
loops, many requests for one kind of document. How much is guessed follows from how long the match is and how often the
places agree.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from octavo.spec_decode.places import Places, evidence, match_length

SHORTEST = 2  # tokens of a match
MAX_STORED_TOKENS = 1 << 16  # of recent answers, over all scopes
_BETWEEN = -1  # no token: no match goes from one answer into the next


@dataclass(slots=True)
class _Text:
    token_ids: list[int] = field(default_factory=list)
    places: Places = field(default_factory=lambda: Places(SHORTEST))
    num_answers: int = 0


@dataclass(slots=True)
class _Sequence:
    scope: bytes
    num_prompt_tokens: int
    places: Places = field(default_factory=lambda: Places(SHORTEST))
    token_ids: list[int] = field(default_factory=list)  # the caller's, which grows


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
        text.places.read(text.token_ids)
        while self.num_tokens > self._max_tokens:
            _, dropped = self._scopes.popitem(last=False)
            self.num_tokens -= sum(len(text.token_ids) for text in dropped)

    def texts(self, scope: bytes) -> list[_Text]:
        """What the scope keeps, the newer half first."""
        return self._scopes.get(scope, [])


class SuffixDrafter:
    """Follows the longest matches of a sequence's end token by token, as long as the places agree well enough."""

    def __init__(self, max_depth: int, max_answers: int, max_spec_factor: float, min_token_prob: float) -> None:
        """``max_depth``: tokens of a match that count; ``max_answers``: kept in a scope, 0 for none;
        ``max_spec_factor``: tokens guessed for each token that matches; ``min_token_prob``: of a whole guess, by
        counts."""
        self._max_depth, self._factor, self._min_prob = max_depth, max_spec_factor, min_token_prob
        self.recent = RecentAnswers(MAX_STORED_TOKENS, max_answers) if max_answers else None
        self._sequences: dict[str, _Sequence] = {}
        self.evidence: list[int] = []  # see `octavo.core.drafts.WeighingDrafter`

    def start(self, req_id: str, scope: bytes, num_prompt_tokens: int) -> None:
        """See `octavo.core.drafts.Drafter`."""
        self._sequences[req_id] = _Sequence(scope, num_prompt_tokens)

    def propose(self, req_id: str, token_ids: list[int], most: int) -> list[int]:
        """See `octavo.core.drafts.Drafter`."""
        sequence = self._sequences[req_id]
        sequence.token_ids = token_ids
        sequence.places.read(token_ids)
        texts = [(token_ids, sequence.places)]
        if self.recent is not None:
            texts += [(text.token_ids, text.places) for text in self.recent.texts(sequence.scope)]
        end, longest, found = tuple(token_ids[-SHORTEST:]), 0, list[tuple[list[int], int]]()
        for text, places in texts:
            for position in places.find(end):
                length = match_length(text, position, token_ids, self._max_depth)
                if length > longest:
                    longest, found = length, []
                if length == longest:
                    found.append((text, position))
        return self._follow(found, longest, min(most, int(self._factor * longest)), token_ids)

    def _follow(self, found: list[tuple[list[int], int]], length: int, most: int, own: list[int]) -> list[int]:
        """The token that most places have next, then of those that have it, and so on; of equals the latest."""
        drafts: list[int] = []
        self.evidence = []
        prob = 1.0
        while found and len(drafts) < most:
            nexts = [self._next(text, position, len(drafts), own) for text, position in found]
            known = [token for token in nexts if token != _BETWEEN]
            if not known:
                break
            token = max(known, key=known.count)
            prob *= known.count(token) / len(nexts)
            if prob < self._min_prob:
                break
            self.evidence.append(evidence(length + len(drafts), len(nexts) - 1, known.count(token) - 1))
            drafts.append(token)
            found = [place for place, following in zip(found, nexts, strict=True) if following == token]
        return drafts

    @staticmethod
    def _next(text: list[int], position: int, offset: int, own: list[int]) -> int:
        """The sequence's own end is followed by what followed there: one that repeats itself goes on to."""
        if text is own:
            return text[position + offset % (len(text) - position)]
        # A place within an answer that has ended: nothing more is known there.
        return text[position + offset] if position + offset < len(text) else _BETWEEN

    def forget(self, req_id: str) -> None:
        """See `octavo.core.drafts.Drafter`."""
        sequence = self._sequences.pop(req_id, None)
        if sequence is not None and self.recent is not None and sequence.token_ids:
            self.recent.add(sequence.scope, sequence.token_ids[sequence.num_prompt_tokens :])
