"""Outputs of a request, as `octavo.LLM` returns them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

if TYPE_CHECKING:
    import torch

Pooled = TypeVar("Pooled")


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position. ``rank`` counts from 1 (the most likely token)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# One dict a position: token id -> Logprob; the sampled (or prompt) token is always in it, first.
PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True, eq=False)
class LogprobsTable(Sequence[PositionLogprobs | None]):
    """Log-probabilities of consecutive positions, kept as the numbers that the core sends: each position's dict is
    created on access. A long answer has tens of thousands of entries, and as objects they would keep Python's
    garbage collector busy. A prompt's first position has none, and is None.
    """

    text_of: Callable[[int], str] | None  # a token's text
    token_ids: list[list[int] | None] = field(default_factory=list)  # a position's, the sampled (or prompt) token first
    logprobs: list[list[float] | None] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)  # of the first one, from 1; the others come in order
    ranked: bool = True  # False: the others are named tokens, whose ranks nobody knows

    def extend(
        self, token_ids: Sequence[list[int] | None], logprobs: Sequence[list[float] | None], ranks: list[int]
    ) -> None:
        """Append positions."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.ranks += ranks

    @property
    def num_values(self) -> int:
        """Log-probabilities of all positions together."""
        return sum(len(ids) for ids in self.token_ids if ids is not None)

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs | None: ...
    @overload
    def __getitem__(self, index: slice) -> LogprobsTable: ...
    def __getitem__(self, index: int | slice) -> PositionLogprobs | LogprobsTable | None:
        if isinstance(index, slice):
            parts = self.token_ids[index], self.logprobs[index], self.ranks[index]
            return LogprobsTable(self.text_of, *parts, self.ranked)
        ids, logprobs = self.token_ids[index], self.logprobs[index]
        if ids is None or logprobs is None:
            return None
        text = self.text_of or _no_text
        position = {ids[0]: Logprob(logprobs[0], self.ranks[index], text(ids[0]))}
        for order in range(1, len(ids)):
            if ids[order] != ids[0]:
                rank = order if self.ranked else None
                position[ids[order]] = Logprob(logprobs[order], rank, text(ids[order]))
        return position

    def __iter__(self) -> Iterator[PositionLogprobs | None]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))


def _no_text(token_id: int) -> None:
    return None


@dataclass(slots=True)
class CompletionOutput:
    """One of the ``n`` answers to a prompt. With RequestOutputKind.DELTA text, token_ids, logprobs are the new part."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: LogprobsTable | None = None  # a sequence of dicts, one a token
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_reason: int | str | None = None  # the stop string or token id that ended it; None for EOS
    # Of `LLM.chat`: the answer as OpenAI's API has it, with role, content, reasoning and tool_calls
    message: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        """True if this answer is complete."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Wall-clock times (seconds since the epoch) of a request's life."""

    arrival_time: float
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class PredictedTokens:
    """Tokens of a request's prediction that its answers repeat, and those that they do not."""

    accepted: int
    rejected: int


@dataclass(slots=True)
class RequestOutput:
    """The state of a request; ``outputs`` holds ``n`` answers, ordered by index."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: LogprobsTable | None = None  # one a prompt token; None for the first
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None
    error_param: str | None = None  # the request field that caused the error; None: not the request
    predicted: PredictedTokens | None = None  # None: there was no prediction
    embedding: list[float] | None = None  # of a pooling request; ``outputs`` then hold no text


@dataclass(slots=True)
class PooledRequestOutput(Generic[Pooled]):
    """A prompt's result of a method that pools."""

    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(slots=True)
class PoolingOutput:
    """``data``: float32 [hidden_size]."""

    data: torch.Tensor


class PoolingRequestOutput(PooledRequestOutput[PoolingOutput]):
    """The result of `LLM.encode` for a prompt."""


@dataclass(slots=True)
class EmbeddingOutput:
    """``embedding``: hidden_size numbers, a vector of length 1."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Length of the vector."""
        return len(self.embedding)


class EmbeddingRequestOutput(PooledRequestOutput[EmbeddingOutput], Sequence[float]):
    """The result of `LLM.embed` for a prompt: vLLM's object, and a sequence of the vector's numbers, so that numpy and
    torch read a list of them as a matrix."""

    def __len__(self) -> int:
        return len(self.outputs.embedding)

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> list[float]: ...
    def __getitem__(self, index: int | slice) -> float | list[float]:
        return self.outputs.embedding[index]

    def __iter__(self) -> Iterator[float]:
        return iter(self.outputs.embedding)

    def __eq__(self, other: object) -> bool:
        """Equal to any sequence of the same numbers."""
        return isinstance(other, Sequence) and self.outputs.embedding == list(other)


@dataclass(slots=True)
class ClassificationOutput:
    """``probs``: one number a class."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.probs)


class ClassificationRequestOutput(PooledRequestOutput[ClassificationOutput]):
    """The result of `LLM.classify` for a prompt."""


@dataclass(slots=True)
class ScoringOutput:
    """``score``: how well two texts go together."""

    score: float


class ScoringRequestOutput(PooledRequestOutput[ScoringOutput]):
    """The result of `LLM.score` for a pair."""
