"""Log-probabilities in the two formats of OpenAI and that of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from octavo.entrypoints.state import ServerState
from octavo.interface.outputs import Logprob, PositionLogprobs
from octavo.text.detokenizer import Vocabulary

_LOWEST = -9999.0  # JSON has no -Infinity


# One entry of vLLM's prompt_logprobs: token id -> what is known of it.
PromptLogprobs = list[dict[str, Any] | None]


class CompletionLogprobs(Struct):
    """Log-probabilities of a text completion, one entry per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    def __add__(self, behind: CompletionLogprobs) -> CompletionLogprobs:
        """Join both, the positions of ``behind`` last."""
        return CompletionLogprobs(
            self.text_offset + behind.text_offset,
            self.token_logprobs + behind.token_logprobs,
            self.tokens + behind.tokens,
            self.top_logprobs + behind.top_logprobs,
        )


class TopLogprob(Struct):
    """An alternative token."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(Struct):
    """A token of a chat answer and its alternatives."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities of a chat answer."""

    content: list[ChatLogprob] | None
    refusal: None = None


class LogprobsFormatter:
    """Formats log-probabilities as a request asks; return_tokens_as_token_ids spells tokens "token_id:123"."""

    def __init__(self, state: ServerState, as_token_ids: bool | None = None) -> None:
        self._vocabulary: Vocabulary | None = state.engine.output_processor.vocabulary
        as_ids = state.args.return_tokens_as_token_ids if as_token_ids is None else as_token_ids
        self._as_ids = as_ids or self._vocabulary is None

    def token(self, token_id: int) -> str:
        """The token as a client is shown it."""
        if self._as_ids or self._vocabulary is None:
            return f"token_id:{token_id}"
        return self._vocabulary.token_text(token_id)

    def _bytes(self, token_id: int) -> list[int] | None:
        return list(self._vocabulary.token_bytes(token_id)) if self._vocabulary is not None else None

    def completion(
        self,
        token_ids: Sequence[int],
        positions: Sequence[PositionLogprobs | None],
        top: int | None,
        offsets: list[int],
    ) -> CompletionLogprobs:
        """The format of /v1/completions. ``top``: the number of most likely tokens, None for those that the request
        names; ``offsets``: the position in the text of each token."""
        tokens = [self.token(token_id) for token_id in token_ids]
        logprobs: list[float | None] = []
        best: list[dict[str, float] | None] = []
        for token_id, position in zip(token_ids, positions, strict=True):
            logprobs.append(None if position is None else _finite(position[token_id]))
            best.append(None if position is None else self._named(position, token_id, top))
        return CompletionLogprobs(offsets, logprobs, tokens, best)

    def _named(self, position: PositionLogprobs, token_id: int, top: int | None) -> dict[str, float]:
        """The sampled token, which clients of vLLM expect first, and the others; the more likely one of two with the
        same text."""
        named: dict[str, float] = {}
        for other, logprob in [(token_id, position[token_id]), *_best(position, top)]:
            text = self.token(other)
            named[text] = max(named.get(text, _LOWEST), _finite(logprob))
        return named

    def chat(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None], top: int | None
    ) -> ChatLogprobs:
        """The format of /v1/chat/completions; ``top`` as in `completion`."""
        content = []
        for token_id, position in zip(token_ids, positions, strict=True):
            assert position is not None
            best = [
                TopLogprob(self.token(other), _finite(logprob), self._bytes(other))
                for other, logprob in _best(position, top)
            ]
            content.append(ChatLogprob(self.token(token_id), _finite(position[token_id]), self._bytes(token_id), best))
        return ChatLogprobs(content)


def _best(position: PositionLogprobs, top: int | None) -> list[tuple[int, Logprob]]:
    """The ``top`` most likely tokens, best first; for None the sampled token and those that the request names."""
    if top is None:
        return [*position.items()]
    return sorted(position.items(), key=lambda item: item[1].rank or 0)[:top]


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, _LOWEST)


def prompt_logprobs(positions: Sequence[PositionLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's format: one object per position, token id -> logprob, rank and text."""
    return [
        None
        if position is None
        else {
            str(token_id): {"logprob": _finite(entry), "rank": entry.rank, "decoded_token": entry.decoded_token}
            for token_id, entry in position.items()
        }
        for position in positions
    ]
