"""How many drafts the sequences of a step get, and what a drafter in the worker is to guess for the next one."""

from __future__ import annotations

from octavo.core.kv_cache_manager import Allocation, KVCacheManager, PrefixHit
from octavo.core.request import Request
from octavo.core.results import CurrentStep
from octavo.core.spec_decode.drafts import Drafts
from octavo.interface.engine_config import SchedulerConfig, num_sampled_rows

NO_DRAFTS: list[int] = []
NOTHING: tuple[list[int], Allocation | None] = (NO_DRAFTS, None)


class DraftScheduler:
    """Drafts take what decoding leaves of a step; nobody waits or is preempted for them."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, drafts: Drafts) -> None:
        self._config, self._kv, self._drafts = config, kv, drafts

    def budget(self, num_requests: int) -> int:
        """Of a step, while there are so many sequences: what decoding leaves of its tokens, and of as many sampled rows
        as `num_sampled_rows`."""
        config = self._config
        rows = num_sampled_rows(config.max_num_seqs, self._drafts.num_speculative_tokens)
        return min(rows, config.max_num_batched_tokens) - min(config.max_num_seqs, num_requests)

    def guess(self, step: CurrentStep, request: Request, num_new: int) -> tuple[list[int], Allocation | None]:
        """Drafts for a sequence of which ``num_new`` tokens are about to be scheduled, and room for both: nobody is
        preempted for drafts."""
        drafts = self._propose(request, num_new, step)
        allocation = self.allocate(request, num_new + len(drafts)) if drafts else None
        return NOTHING if allocation is None else (drafts, allocation)

    def _propose(self, request: Request, num_new: int, step: CurrentStep) -> list[int]:
        drafts, in_flight = self._drafts, request.num_output_placeholders
        if request.num_computed_tokens < request.images_until:
            return NO_DRAFTS
        if num_new != 1 or not (drafts.on_device if in_flight else request.num_output_tokens):
            return NO_DRAFTS
        if not drafts.asks(request):
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
        """Room for ``num_new`` tokens, and where there is any for what a drafter in the worker reads after them."""
        until = request.num_computed_tokens + num_new
        if self._drafts.num_lookahead and until >= request.num_tokens:
            beyond = min(self._drafts.num_lookahead, self._config.max_model_len - until)
            allocation = self._kv.allocate_slots(request, num_new + beyond, hit)
            if allocation is not None:
                return allocation
        return self._kv.allocate_slots(request, num_new, hit)

    def wanted(self, step: CurrentStep, num_requests: int) -> dict[str, int]:
        """What a drafter in the worker is to guess after this step, for the next one: no more than that has room for,
        and may follow the one token at least that this one brings."""
        drafts = self._drafts
        drafts.begin_step(len(step.scheduled))
        room, wanted, longest = self.budget(num_requests), dict[str, int](), self._config.long_prefill_token_threshold
        for req_id, scheduled in step.scheduled.items():
            request = scheduled.request
            if drafts.on_device:
                drafts.set_ready(request, 0)
            if request.pooling is not None:
                continue
            if not scheduled.sampled:
                if drafts.reads(request):
                    wanted[req_id] = 0
            elif room > 0:
                in_flight, hoped = request.num_output_placeholders, request.num_drafts if drafts.on_device else 0
                most = min(
                    room,
                    request.max_tokens - request.num_output_tokens - in_flight - 1,
                    self._config.max_model_len - request.num_tokens - in_flight - hoped - 1,
                    longest - 1 if longest > 0 else room,
                )
                count = drafts.num_wanted(request, most)
                if count > 0:
                    wanted[req_id] = count
                    drafts.set_ready(request, count)
                    room -= count
        return wanted
