"""One sequence as the scheduler sees it: its tokens, how far they are computed, and when it ends."""

from __future__ import annotations

from enum import IntEnum

from octavo.core.thoughts import ThoughtWatch
from octavo.interface.images import ImageItem, key_token_ids
from octavo.interface.messages import EngineCoreRequest

NO_LIMIT = 1 << 60
_NO_ITEMS: list[ImageItem] = []


class RequestStatus(IntEnum):
    """The state of a sequence; see `Request` for the transitions."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    # Everything from here on is an end.
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6


_FIRST_END = RequestStatus.FINISHED_STOPPED  # looking a member up in its class takes longer than comparing it
FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class Request:
    """One sequence: one of the ``n`` samples of a request, from `Scheduler.add_request` to its end.

    States (``status``) and what moves a sequence between them::

        WAITING --admit--> RUNNING --preempt--> PREEMPTED --admit--> RUNNING
        any of them --last token, stop string, abort or error--> FINISHED_*

    WAITING: queued, or a sample whose leader's prompt is not scheduled yet; holds no blocks unless it was forked from
    that prompt. RUNNING: has a row in the runner and blocks for its computed tokens. PREEMPTED: at the front of the
    queue with its tokens and without blocks. FINISHED_*: holds nothing; results still in flight are dropped.

    Counters, all of tokens from position 0; num_confirmed <= num_computed <= num_tokens + num_output_placeholders +
    num_drafts:

    - ``num_prompt_tokens``, ``num_tokens``, ``num_output_tokens``: what the scheduler knows.
    - ``num_output_placeholders``: sampled tokens known to the device alone, one for each step in flight that samples.
    - ``num_drafts``: drafts that steps in flight verify, counted as computed until these are back. Unless the device
      knows where the next step begins, none is scheduled before that.
    - ``num_rejected``: drafts of all steps so far that were wrong.
    - ``num_computed_tokens``: keys and values written once every step scheduled so far has run.
    - ``num_confirmed_tokens``: those whose step has reported back. Only they reach the prefix cache.
    - ``num_state_tokens``: those that its state has seen once every step scheduled so far has run, see
      `octavo.core.states.manager.committed_tokens`; 0 in models without states.
    - ``num_kv_tokens``: keys and values found in shared blocks, never written again.
    - ``num_cached_tokens``: what the first admission found in the prefix cache, as reported to the user.
    - ``num_prompt_logprobs``: prompt positions whose log-probabilities have been reported.

    ``mm_items`` are its images, ``images_until`` the position after the last one's tokens (0: there are none).
    ``key_token_ids`` are its tokens as the prefix cache knows them: the same list, unless there are images.

    ``thoughts`` watches their budget: None where there is none, and once they have ended.

    ``epoch`` counts how often its blocks were taken away: results of steps before that say nothing of the new blocks.
    """

    __slots__ = (
        "adapter",
        "all_token_ids",
        "block_hashes",
        "core_request",
        "eos_token_ids",
        "epoch",
        "grammar",
        "images_until",
        "index",
        "key_token_ids",
        "max_tokens",
        "mm_items",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_confirmed_tokens",
        "num_drafts",
        "num_kv_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_rejected",
        "num_state_tokens",
        "pooling",
        "req_id",
        "request_id",
        "sampling_params",
        "scheduled_time",
        "snapshot_points",
        "status",
        "stop_reason",
        "stop_token_ids",
        "thoughts",
    )

    def __init__(self, core_request: EngineCoreRequest, index: int = 0) -> None:
        params = core_request.sampling_params
        self.core_request = core_request
        self.request_id = core_request.request_id
        self.index = index
        self.req_id = f"{index}#{core_request.request_id}"
        self.all_token_ids = list(core_request.prompt_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.mm_items: list[ImageItem] = core_request.mm_items or _NO_ITEMS
        self.images_until = self.mm_items[-1].end if self.mm_items else 0
        self.key_token_ids = key_token_ids(self.all_token_ids, core_request.mm_items)
        self.sampling_params = params
        self.max_tokens: int = params.max_tokens if params.max_tokens is not None else NO_LIMIT
        if core_request.pooling is not None:
            self.max_tokens = 1  # the prompt's last step ends it: none may follow while that one is in flight
        self.eos_token_ids = frozenset(() if params.ignore_eos else core_request.eos_token_ids)
        self.stop_token_ids = self.eos_token_ids | frozenset(params.stop_token_ids)
        self.pooling = core_request.pooling
        self.grammar = core_request.grammar
        self.thoughts = ThoughtWatch(core_request.thoughts) if core_request.thoughts is not None else None
        self.adapter = core_request.adapter

        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.num_computed_tokens = 0
        self.num_confirmed_tokens = 0
        self.num_kv_tokens = self.num_state_tokens = 0
        self.num_output_placeholders = 0
        self.num_drafts = self.num_rejected = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0  # since the last output
        self.num_prompt_logprobs = 0
        self.epoch = 0
        self.scheduled_time: float | None = None  # of the first admission
        self.snapshot_points: list[tuple[int, str]] = []  # see `octavo.core.states.points`; the next one is the last
        self.block_hashes: list[bytes] = []  # of its full blocks, as far as they were asked for

    @property
    def skip_prefix_cache(self) -> bool:
        """True if every position's hidden state is needed, so that no cached prefix may be skipped over."""
        return self.sampling_params.prompt_logprobs is not None or self.pooling is not None

    @property
    def num_tokens(self) -> int:
        """Tokens that the CPU knows: prompt and confirmed output."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens that the CPU knows."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """True if it has ended, in whatever way."""
        return self.status >= _FIRST_END

    @property
    def finish_reason(self) -> str | None:
        """ "stop" | "length" | "abort" | "error", None while it is unfinished."""
        return FINISH_REASONS[self.status] if self.status >= _FIRST_END else None

    def append_output_token(self, token_id: int, max_model_len: int) -> bool:
        """Take a sampled token; True when it ends the sequence (``status`` and ``stop_reason`` then say how)."""
        self.all_token_ids.append(token_id)
        if self.images_until:
            self.key_token_ids.append(token_id)
        num_tokens = len(self.all_token_ids)
        num_output = num_tokens - self.num_prompt_tokens
        if token_id in self.stop_token_ids and num_output >= self.sampling_params.min_tokens:
            self.status = RequestStatus.FINISHED_STOPPED
            self.stop_reason = None if token_id in self.eos_token_ids else token_id
            return True
        if num_output >= self.max_tokens or num_tokens >= max_model_len:
            self.status = RequestStatus.FINISHED_LENGTH_CAPPED
            return True
        return False

    def append_known_tokens(self, token_ids: list[int], max_model_len: int) -> bool:
        """Take tokens of which it is known that they follow, as many as there is room for; True when that ends the
        sequence."""
        room = min(self.max_tokens - self.num_output_tokens, max_model_len - self.num_tokens)
        self.all_token_ids += token_ids[:room]
        if self.images_until:
            self.key_token_ids += token_ids[:room]
        if len(token_ids) >= room:
            self.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return len(token_ids) >= room

    def __lt__(self, other: Request) -> bool:
        """Order requests by the priority policy: the first is served first."""
        return self._priority_order() < other._priority_order()

    def _priority_order(self) -> tuple[int, float, str, int]:
        return self.core_request.priority, self.core_request.arrival_time, self.request_id, self.index

    def __repr__(self) -> str:
        return f"Request({self.req_id}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens} computed)"
