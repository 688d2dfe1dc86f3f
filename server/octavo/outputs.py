"""What the engine gives back for a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position. ``rank`` counts from 1 (the most likely token)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# One dict a position: token id -> Logprob; the sampled (or prompt) token is always in it, first.
PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One of the ``n`` answers to a prompt. With RequestOutputKind.DELTA text, token_ids, logprobs are the new part."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_reason: int | str | None = None  # the stop string or token id that ended it; None for EOS

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Wall-clock times (seconds since the epoch) of a request's life."""

    arrival_time: float
    queued_time: float | None = None
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request; ``outputs`` holds ``n`` answers, ordered by index."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None
    embedding: list[float] | None = None  # of a pooling request; ``outputs`` then hold no text
