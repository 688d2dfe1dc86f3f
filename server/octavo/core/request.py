"""One sequence as the scheduler sees it: its tokens, how far they are computed, and when it ends."""

from __future__ import annotations

from enum import IntEnum

from octavo.interface.messages import EngineCoreRequest

NO_LIMIT = 1 << 60


class RequestStatus(IntEnum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    # Everything from here on is an end.
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6

    @property
    def is_finished(self) -> bool:
        return self >= RequestStatus.FINISHED_STOPPED


_FIRST_END = RequestStatus.FINISHED_STOPPED  # looking a member up in its class takes longer than comparing it
FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class Request:
    """One of the ``n`` samples of a request.

    Positions run from 0. ``num_computed_tokens`` counts the tokens whose keys and values are written once every step
    handed out so far has run; ``num_confirmed_tokens`` those that have been reported back. ``num_output_placeholders``
    counts sampled tokens that the device has and the CPU does not know yet (one for each step in flight).
    """

    __slots__ = (
        "all_token_ids", "arrival_time", "block_hashes", "cache_salt", "confirm_limit", "core_request",
        "eos_token_ids",
        "grammar", "epoch", "index", "max_tokens", "num_cached_tokens",
        "num_computed_tokens", "num_confirmed_tokens", "num_hashed_blocks", "num_kv_tokens",
        "num_output_placeholders", "num_preemptions", "num_prompt_logprobs", "num_prompt_tokens",
        "partial_registered", "pooling", "priority", "req_id", "request_id", "sampling_params",
        "scheduled_time", "skip_prefix_cache", "status", "stop_reason", "stop_token_ids",
    )  # fmt: skip

    def __init__(self, core_request: EngineCoreRequest, index: int = 0) -> None:
        params = core_request.sampling_params
        self.request_id = core_request.request_id
        self.index = index
        self.core_request = core_request
        self.req_id = f"{index}#{core_request.request_id}"
        self.all_token_ids = list(core_request.prompt_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.sampling_params = params
        self.max_tokens: int = params.max_tokens if params.max_tokens is not None else NO_LIMIT
        if core_request.pooling is not None:
            self.max_tokens = 1  # the prompt's last step ends it: none may follow while that one is in flight
        self.eos_token_ids = frozenset(() if params.ignore_eos else core_request.eos_token_ids)
        self.stop_token_ids = self.eos_token_ids | frozenset(params.stop_token_ids)
        self.priority = core_request.priority
        self.arrival_time = core_request.arrival_time
        self.cache_salt = core_request.cache_salt
        self.pooling = core_request.pooling
        self.grammar = core_request.grammar
        # Every position's hidden state is needed, so nothing may be skipped over.
        self.skip_prefix_cache = params.prompt_logprobs is not None or core_request.pooling is not None

        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.num_computed_tokens = 0
        self.num_confirmed_tokens = 0
        self.confirm_limit = NO_LIMIT  # higher positions are in a block whose copy is still in flight
        self.num_kv_tokens = 0  # KV of lower positions was found in shared blocks: never written again
        self.num_output_placeholders = 0
        self.num_cached_tokens = -1  # of the first admission; -1: not admitted yet
        self.num_preemptions = 0  # since the last output
        self.num_prompt_logprobs = 0  # positions whose log-probabilities have been reported
        self.epoch = 0  # raised by every preemption: results of steps before it say nothing of the new blocks
        self.scheduled_time: float | None = None
        self.block_hashes: list[bytes] = []
        self.num_hashed_blocks = 0
        self.partial_registered = False

    @property
    def num_tokens(self) -> int:
        """Tokens that the CPU knows: prompt and confirmed output."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status >= _FIRST_END

    @property
    def finish_reason(self) -> str | None:
        return FINISH_REASONS[self.status] if self.status >= _FIRST_END else None

    def append_output_token(self, token_id: int, max_model_len: int) -> bool:
        """Take a sampled token; True when it ends the sequence (``status`` and ``stop_reason`` then say how)."""
        self.all_token_ids.append(token_id)
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

    def __lt__(self, other: Request) -> bool:
        """Who is served first under the priority policy."""
        return (self.priority, self.arrival_time, self.request_id, self.index) < (
            other.priority, other.arrival_time, other.request_id, other.index,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"Request({self.req_id}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens} computed)"
