"""Draft tokens of running sequences, which a step verifies beside the token that it computes anyway."""

from __future__ import annotations

import logging
from typing import Protocol

from octavo.core.request import Request
from octavo.interface.messages import SpecDecodeStats

logger = logging.getLogger(__name__)


def num_sampled_rows(max_num_seqs: int, num_speculative_tokens: int) -> int:
    """Most tokens that a step samples after. Where all sequences that may run do, that leaves none for drafts: a step
    is then so large that each further token costs its full time."""
    return max(max_num_seqs, num_speculative_tokens + 1)


class Drafter(Protocol):
    """Guesses the tokens that come next. A wrong guess costs time, never a token."""

    def propose(self, req_id: str, token_ids: list[int], most: int) -> list[int]:
        """Up to ``most`` tokens to follow ``token_ids``, the prompt and output of a sequence so far."""

    def forget(self, req_id: str) -> None:
        """The sequence has ended; it may be unknown."""


class Drafts:
    """Asks a drafter where drafts can be verified, believes nothing it says, and counts what is accepted."""

    def __init__(self, drafter: Drafter, num_speculative_tokens: int, vocab_size: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._failed = False
        self._stats = SpecDecodeStats()

    def propose(self, request: Request, most: int) -> list[int]:
        """Drafts for a sequence whose tokens are all known, at most ``most``. None with a grammar: which tokens it
        allows is known one token at a time."""
        most = min(most, self.num_speculative_tokens)
        if most < 1 or request.grammar is not None:
            return []
        try:
            proposed = self._drafter.propose(request.req_id, request.all_token_ids, most)[:most]
            known = [type(token) is int and 0 <= token < self._vocab_size for token in proposed]
        except Exception:
            if not self._failed:
                logger.exception("the drafter failed; sequences go on without drafts where it does")
            self._failed = True
            return []
        return proposed if all(known) else proposed[: known.index(False)]

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """A step has accepted ``num_accepted`` of a sequence's ``num_drafts``."""
        stats = self._stats
        stats.num_drafts += 1
        stats.num_draft_tokens += num_drafts
        missing = num_accepted - len(stats.num_accepted_per_pos)
        stats.num_accepted_per_pos += [0] * missing
        for position in range(num_accepted):
            stats.num_accepted_per_pos[position] += 1

    def take_stats(self) -> SpecDecodeStats:
        """Counts since the last call."""
        stats, self._stats = self._stats, SpecDecodeStats()
        return stats

    def forget(self, request: Request) -> None:
        """The sequence has ended."""
        try:
            self._drafter.forget(request.req_id)
        except Exception:
            logger.exception("the drafter failed to forget a sequence")
