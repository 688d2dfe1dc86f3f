"""The drafts of a step's sequences, and the order to a drafter in the worker for the next step."""

from __future__ import annotations

from octavo.core.kv_cache_manager import Allocation, KVCacheManager
from octavo.core.prefix_finder import PrefixHit
from octavo.core.request import Request
from octavo.core.results import CurrentStep
from octavo.core.spec_decode.drafts import Drafts
from octavo.interface.engine_config import SchedulerConfig, num_sampled_rows
from octavo.interface.messages import SpecDecodeStats
from octavo.interface.step import SchedulerOutput

NO_DRAFTS: list[int] = []
NOTHING: tuple[list[int], Allocation | None] = (NO_DRAFTS, None)


class NoDrafts:
    """The hooks of `DraftScheduler` in an engine without speculative decoding."""

    drafts: Drafts | None = None
    num_speculative_tokens = num_reserved = 0
    on_device = False

    def __init__(self, kv: KVCacheManager) -> None:
        self.allocate = kv.allocate_slots

    def begin_step(self, step: CurrentStep, decoding: list[Request], num_requests: int) -> bool:
        """Nobody waits; the step's budget of drafts stays 0."""
        return False

    def guess(self, step: CurrentStep, request: Request, num_new: int) -> tuple[list[int], Allocation | None]:
        """Propose nothing."""
        return NOTHING

    def order(self, step: CurrentStep, output: SchedulerOutput, num_requests: int) -> None:
        """Order nothing."""

    def withdraw(self, request: Request) -> None:
        """There is nothing to withdraw."""

    def release(self, request: Request) -> None:
        """There is nothing to release."""

    def take_stats(self) -> SpecDecodeStats | None:
        """There are no counts."""
        return None


class DraftScheduler:
    """Drafts take what decoding leaves of a step; nobody waits or is preempted for them."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, drafts: Drafts) -> None:
        self._config, self._kv, self.drafts = config, kv, drafts
        self.num_speculative_tokens, self.on_device = drafts.num_speculative_tokens, drafts.on_device
        self.num_reserved = drafts.num_reserved
        self.withdraw, self.release, self.take_stats = drafts.withdraw, drafts.release, drafts.take_stats

    def begin_step(self, step: CurrentStep, decoding: list[Request], num_requests: int) -> bool:
        """Set the step's budget of drafts. Returns True if all of ``decoding`` wait for tokens in flight."""
        step.draft_budget = self.budget(num_requests)
        if not self.drafts.num_lookahead and not self.drafts.begin_step(len(decoding)):
            step.draft_budget = 0  # with lookahead the step before has chosen
        return step.draft_budget > 0 and self.drafts.decide_to_wait(decoding)

    def budget(self, num_requests: int) -> int:
        """The budget of drafts of a step, with so many sequences: the tokens that decoding leaves, and the rows that it
        leaves of `num_sampled_rows`."""
        config = self._config
        rows = num_sampled_rows(config.max_num_seqs, self.num_reserved)
        return min(rows, config.max_num_batched_tokens) - min(config.max_num_seqs, num_requests)

    def guess(self, step: CurrentStep, request: Request, num_new: int) -> tuple[list[int], Allocation | None]:
        """Propose drafts for a sequence whose ``num_new`` tokens are about to be scheduled, and allocate room for both:
        nobody is preempted for drafts."""
        drafts = self._propose(request, num_new, step)
        allocation = self.allocate(request, num_new + len(drafts)) if drafts else None
        return NOTHING if allocation is None else (drafts, allocation)

    def _propose(self, request: Request, num_new: int, step: CurrentStep) -> list[int]:
        drafts, in_flight = self.drafts, request.num_output_placeholders
        if request.num_computed_tokens < request.images_until:
            return NO_DRAFTS
        if num_new != 1 or not (drafts.on_device if in_flight else request.num_output_tokens):
            return NO_DRAFTS
        if not drafts.take_turn(request):
            return NO_DRAFTS
        threshold = self._config.long_prefill_token_threshold
        most = min(
            step.draft_budget,
            step.budget - num_new,
            request.max_tokens - request.num_output_tokens - in_flight - 1,  # the last token is not a draft
            self._config.max_model_len - request.num_tokens - in_flight - request.num_drafts - 1,
            threshold - 1 if threshold > 0 else step.draft_budget,
        )
        return drafts.propose(request, most)

    def allocate(self, request: Request, num_new: int, hit: PrefixHit | None = None) -> Allocation | None:
        """Allocate room for ``num_new`` tokens and, where there is any, for those that a drafter in the worker adds."""
        until = request.num_computed_tokens + num_new
        if self.drafts.num_lookahead and until >= request.num_tokens:
            beyond = min(self.drafts.num_lookahead, self._config.max_model_len - until)
            allocation = self._kv.allocate_slots(request, num_new + beyond, hit)
            if allocation is not None:
                return allocation
        return self._kv.allocate_slots(request, num_new, hit)

    def order(self, step: CurrentStep, output: SchedulerOutput, num_requests: int) -> None:
        """Order drafts for the next step from a drafter in the worker: no more than that has room for, and may follow
        the one token at least that this step brings."""
        drafts = self.drafts
        if not drafts.num_lookahead:
            return
        drafts.begin_step(len(step.scheduled))
        room, wanted, longest = self.budget(num_requests), dict[str, int](), self._config.long_prefill_token_threshold
        for req_id, scheduled in step.scheduled.items():
            request = scheduled.request
            if drafts.on_device:
                drafts.withdraw(request)
            if request.pooling is not None:
                continue
            if not scheduled.sampled:
                if drafts.needs_prompt(request):
                    wanted[req_id] = 0
            elif room > 0:
                in_flight, hoped = request.num_output_placeholders, request.num_drafts if drafts.on_device else 0
                most = min(
                    room,
                    request.max_tokens - request.num_output_tokens - in_flight - 1,
                    self._config.max_model_len - request.num_tokens - in_flight - hoped - 1,
                    longest - 1 if longest > 0 else room,
                )
                count = drafts.order(request, most)
                if count > 0:
                    wanted[req_id] = count
                    room -= count
        output.num_draft_tokens = wanted
