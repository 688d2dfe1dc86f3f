"""Draft tokens of running sequences, which a step verifies beside the token that it computes anyway."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from octavo.core.prefix_hash import root_of
from octavo.core.request import Request
from octavo.core.spec_decode.lengths import NO_EVIDENCE, DraftLengths
from octavo.core.spec_decode.waits import DraftWaits
from octavo.core.spec_decode.worker_drafts import WorkerDrafts
from octavo.core.spec_decode.worth import DraftWorth
from octavo.interface.messages import SpecDecodeStats

logger = logging.getLogger(__name__)


ON_DEVICE = -1  # a draft that the device alone knows


class Drafter(Protocol):
    """Proposes the tokens that come next. A wrong draft costs time, never a token."""

    def start(self, req_id: str, scope: bytes, num_prompt_tokens: int) -> None:
        """Begin a sequence. ``scope``: only sequences of one may learn of each other's tokens."""

    def propose(self, req_id: str, token_ids: list[int], most: int) -> list[int]:
        """Propose up to ``most`` tokens to follow ``token_ids``, the prompt and output of a sequence so far: always the
        same list, which grows."""

    def forget(self, req_id: str) -> None:
        """A sequence has ended."""


@runtime_checkable
class WeighingDrafter(Drafter, Protocol):
    """A drafter that tells good drafts from bad ones."""

    evidence: Sequence[int]
    """The evidence for each token of the last proposal, above `NO_EVIDENCE`: tokens of one number are right about
    equally often, if all before them are."""


@runtime_checkable
class ExpectingDrafter(Drafter, Protocol):
    """A drafter that takes predictions: texts which outputs may repeat."""

    def expect(self, req_id: str, token_ids: list[int], num_prompt_tokens: int) -> None:
        """Expect a sequence's output, which follows its prompt, to repeat ``token_ids``; called after `start`."""


class Drafts:
    """The scheduler's side of a drafter: has it `propose` drafts, `observe`s how many are right, `release`s sequences.

    The drafter's answers are untrusted input. Methods that return bool and are no verb change nothing.
    """

    def __init__(
        self,
        drafter: Drafter,
        num_speculative_tokens: int,
        vocab_size: int,
        lengths: DraftLengths | None = None,
        overlap: bool = False,
        only_predicted: bool = False,
    ) -> None:
        """``lengths`` decides how many tokens are proposed; None: always as many as can be. ``overlap``: steps may
        overlap, on a device that verifies all drafts of a sequence at once. ``only_predicted``: only sequences with a
        prediction have drafts, for which the device has no room set aside."""
        self.num_speculative_tokens = num_speculative_tokens
        self.num_reserved = 0 if only_predicted else num_speculative_tokens  # rows for which the device has room
        self._only_predicted = only_predicted
        self._drafter = drafter
        self._worker = drafter if isinstance(drafter, WorkerDrafts) else None
        self._weighing = drafter if isinstance(drafter, WeighingDrafter) else None
        self._expecting = drafter if isinstance(drafter, ExpectingDrafter) else None
        self._vocab_size = vocab_size
        self._lengths = lengths
        self._overlap = overlap
        self._waits = DraftWaits() if overlap and lengths is not None and self._worker is None else None
        self._worth = DraftWorth() if not overlap and lengths is not None else None
        self._given_up = False  # for this step
        self._ready: dict[str, int] = {}  # drafts on the device that the next step may verify
        self._started: set[str] = set()
        self._failed = False
        self._stats = SpecDecodeStats()

    def begin_step(self, num_decoding: int) -> bool:
        """Begin a step in which so many sequences get a token. Returns True if a draft may be worth its time; on a
        device whose steps overlap `decide_to_wait` finds out."""
        if self._lengths is None:
            return True
        self._lengths.begin_step(num_decoding)
        self._given_up = self._worth is not None and not self._worth.begin_step(num_decoding)
        return self._overlap or (self._lengths.can_pay and not self._given_up)

    def decide_to_wait(self, decoding: list[Request]) -> bool:
        """Decide if sequences that decode wait for the token of one of them that is in flight, so that all get drafts
        in one step after it. Called once a step."""
        if not self._overlap or self._worker is not None:
            return False
        if not any(request.num_output_placeholders for request in decoding):
            return False
        return self._waits is None or self._waits.decide(len(decoding))

    def can_verify(self, request: Request) -> bool:
        """True if drafts of the sequence can be verified. All at once they cannot be where sampling looks at the tokens
        before one, as penalties do, or waits for a grammar that follows them; drafts on the device only by the
        captured sampler."""
        if not self._overlap:
            return True
        if request.grammar is not None or request.sampling_params.reads_tokens:
            return False
        return self._worker is None or not request.sampling_params.edits_logits

    def observe_step(self, num_tokens: int, seconds: float, alone: bool = True, drafting: float = 0.0) -> None:
        """Observe that a step of ``num_tokens``, none of a prompt, took ``seconds``, and a drafter in the worker
        ``drafting`` seconds beside it; ``alone``: no other was in flight."""
        if self._worth is not None:
            self._worth.end_step(seconds + drafting)
        if self._waits is not None:
            self._waits.observe_step(num_tokens, seconds, alone)
        if self._lengths is not None and (alone or self._waits is None):
            self._lengths.times.observe(num_tokens, seconds)

    @property
    def on_device(self) -> bool:
        """True if drafts are made and verified on a device whose steps overlap: the scheduler knows only their number,
        and how many are right once the step is back."""
        return self._overlap and self._worker is not None

    @property
    def num_lookahead(self) -> int:
        """Positions after a step's own whose keys and values a drafter in the worker writes at most; 0: it is none."""
        return self.num_speculative_tokens if self._worker is not None else 0

    def observe_drafting(self, num_drafts: int, seconds: float) -> None:
        """Observe that a drafter in the worker took ``seconds`` beside such a step for its drafts."""
        if self._lengths is not None and num_drafts:
            self._lengths.observe_drafting(num_drafts, seconds)

    def order(self, request: Request, most: int) -> int:
        """Order drafts that a drafter in the worker makes after the step that is being scheduled; returns how many."""
        count = self._choose_length(request, most)
        if count > 0:
            self._ready[request.req_id] = count
        return count

    def _choose_length(self, request: Request, most: int) -> int:
        most = min(most, self.num_speculative_tokens)
        if most < 1 or self._given_up or not self.can_verify(request):
            return 0
        if self._lengths is None:
            return most
        nothing = (NO_EVIDENCE,) * most
        length = self._lengths.choose(request.req_id, nothing)
        if self._lengths.never_wrong:  # a model of the same mind: until its first mistake there is nothing to weigh
            length = most
        self._lengths.add(request.req_id, nothing[:length])
        return length

    def needs_prompt(self, request: Request) -> bool:
        """True if a drafter in the worker has to read the prompt, since it will be asked for drafts."""
        return self._lengths is None or self._lengths.pays(request.req_id)

    def receive(self, drafts: dict[str, list[int]]) -> None:
        """Receive the drafts that a drafter in the worker made in the step whose results are taken in."""
        if self._worker is not None:
            self._worker.receive(drafts)

    def take_turn(self, request: Request) -> bool:
        """Count one more step of a sequence, whose tokens are all known unless drafts are on the device. Returns False
        while the sequence rests from drafts, or has none."""
        if self._only_predicted and (request.core_request.prediction is None or request.grammar is not None):
            return False  # of a grammar there is one mask a sequence
        if self._worker is not None:
            return True
        if self._waits is not None and self.can_verify(request):
            self._waits.count_turn()
        return self._lengths is None or self._lengths.take_turn(request.req_id)

    def propose(self, request: Request, most: int) -> list[int]:
        """Propose at most ``most`` drafts for a sequence that has its turn."""
        most = min(most, self.num_speculative_tokens)
        if self.on_device:
            return [ON_DEVICE] * min(most, self._ready.pop(request.req_id, 0))
        if most < 1 or not self.can_verify(request):
            return []
        req_id = request.req_id
        lengths = self._lengths if self._worker is None else None  # else what was wanted is what is there
        try:
            if req_id not in self._started:
                self._started.add(req_id)
                scope = root_of(request.core_request)  # as of the prefix cache
                self._drafter.start(req_id, scope, request.num_prompt_tokens)
                prediction = request.core_request.prediction
                if prediction is not None and self._expecting is not None:
                    self._expecting.expect(req_id, prediction, request.num_prompt_tokens)
            proposed = self._drafter.propose(req_id, request.all_token_ids, most)[:most]
            known = [type(token) is int and 0 <= token < self._vocab_size for token in proposed]
        except Exception:
            if not self._failed:
                logger.exception("the drafter failed; sequences go on without drafts where it does")
            self._failed = True
            return []
        drafts = proposed if all(known) else proposed[: known.index(False)]
        if lengths is not None:
            evidence = self._weighing.evidence if self._weighing is not None else (NO_EVIDENCE,) * len(drafts)
            drafts = drafts[: lengths.choose(req_id, evidence[: len(drafts)])]
            lengths.add(req_id, evidence[: len(drafts)])
        return drafts

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Observe that a step accepted ``num_accepted`` of a sequence's ``num_drafts``."""
        if self._waits is not None:
            self._waits.observe(num_accepted)
        if self._worth is not None:
            self._worth.observe(num_accepted)
        if self._lengths is not None:
            self._lengths.observe(request.req_id, num_drafts, num_accepted)
        stats = self._stats
        stats.num_drafts += 1
        stats.num_draft_tokens += num_drafts
        missing = num_accepted - len(stats.num_accepted_per_pos)
        stats.num_accepted_per_pos += [0] * missing
        for position in range(num_accepted):
            stats.num_accepted_per_pos[position] += 1

    def take_stats(self) -> SpecDecodeStats:
        """Take the counts since the last call."""
        stats, self._stats = self._stats, SpecDecodeStats()
        return stats

    def withdraw(self, request: Request) -> None:
        """Withdraw the drafts that the device has of a sequence."""
        self._ready.pop(request.req_id, None)

    def release(self, request: Request) -> None:
        """Release all that is kept of a sequence, which has ended."""
        self._ready.pop(request.req_id, None)
        if self._lengths is not None:
            self._lengths.release(request.req_id)
        if request.req_id not in self._started:
            return
        self._started.discard(request.req_id)
        try:
            self._drafter.forget(request.req_id)
        except Exception:
            logger.exception("the drafter failed to forget a sequence")
