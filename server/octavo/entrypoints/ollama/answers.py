"""Answers in Ollama's form. Durations in nanoseconds."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from octavo.chat.answer import CallDelta
from octavo.entrypoints.dialect import CheckedRequest
from octavo.entrypoints.generation.logprobs import ChatLogprob, LogprobsFormatter
from octavo.entrypoints.ollama.prepare import PreparedAnswer, constraint_of
from octavo.entrypoints.ollama.protocol import ChatRequest, GenerateRequest
from octavo.entrypoints.transport.responses import JSON, encode_json
from octavo.interface.outputs import CompletionOutput, RequestMetrics, RequestOutput

NDJSON = "application/x-ndjson"


class CallFunction(Struct):
    """Name and arguments of a call, and its place among those of its message."""

    name: str
    arguments: dict[str, Any]
    index: int


class Call(Struct):
    """A call of a tool."""

    id: str
    function: CallFunction


class Message(Struct):
    """The model's message, or what is new in it."""

    content: str = ""
    role: str = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class _Answer(Struct, kw_only=True):
    model: str
    created_at: str
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET


class ChatAnswer(_Answer, kw_only=True):
    """The answer of /api/chat, or a line of it."""

    message: Message


class GenerateAnswer(_Answer, kw_only=True):
    """The answer of /api/generate, or a line of it. ``context``: the tokens of prompt and answer."""

    response: str
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET


class EmbedAnswer(Struct):
    """The answer of /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingsAnswer(Struct):
    """The answer of /api/embeddings."""

    embedding: list[float]


async def whole(prepared: PreparedAnswer, outputs: list[RequestOutput]) -> Struct:
    """Make the answer of a request's final output."""
    (output,) = outputs
    (completion,) = output.outputs
    delta, totals = prepared.new_parser().parse(completion), Totals()
    totals.add(output, completion)
    calls, logprobs = whole_calls(delta.calls), logprobs_of(prepared, completion)
    return answer_of(prepared, delta.content, delta.reasoning, calls, logprobs, **totals.fields(prepared))


def loaded(checked: CheckedRequest[Any]) -> Response:
    """Answer a request without a prompt: it would load the model, or with keep_alive 0 unload it. Raises APIError."""
    state, body = checked.state, checked.body
    constraint_of(body.format)  # a wrong one is refused, whatever else is asked
    reason = "unload" if body.unloads else "load"
    common: dict[str, Any] = {
        "model": body.model or state.model_name,
        "created_at": timestamp(),
        "done": True,
        "done_reason": reason,
    }
    answer: Struct
    if isinstance(body, ChatRequest):
        answer = ChatAnswer(**common, message=Message())
    else:
        answer = GenerateAnswer(**common, response="")
    return Response(encode_json(answer) + b"\n", media_type=NDJSON) if body.streams else JSON(answer)


@dataclass
class Totals:
    """Sums up an answer for its last line."""

    token_ids: list[int] = field(default_factory=list)
    last: RequestOutput | None = None
    reason: str | None = None

    def add(self, output: RequestOutput, completion: CompletionOutput) -> None:
        """Note the next output."""
        self.last = output
        self.token_ids += completion.token_ids
        self.reason = completion.finish_reason

    def fields(self, prepared: PreparedAnswer) -> dict[str, Any]:
        """Return the fields of the line."""
        assert self.last is not None
        prompt = self.last.prompt_token_ids
        context = {}
        if isinstance(prepared.body, GenerateRequest) and not prepared.body.raw:
            context = {"context": [*prompt, *self.token_ids]}
        return {
            "done": True,
            "done_reason": self.reason,
            "prompt_eval_count": len(prompt),
            "eval_count": len(self.token_ids),
            **durations(prepared.checked.began, self.last.metrics),
            **context,
        }


def answer_of(
    prepared: PreparedAnswer,
    text: str,
    thinking: str = "",
    calls: list[Call] | None = None,
    logprobs: list[ChatLogprob] | UnsetType = UNSET,
    **fields: Any,
) -> Struct:
    """Make an answer, or a line of one."""
    common = {"model": prepared.model, "created_at": timestamp(), "logprobs": logprobs, **fields}
    if isinstance(prepared.body, ChatRequest):
        message = Message(text, thinking=thinking or UNSET, tool_calls=calls or UNSET)
        return ChatAnswer(message=message, **common)
    return GenerateAnswer(response=text, thinking=thinking or UNSET, **common)


def logprobs_of(prepared: PreparedAnswer, completion: CompletionOutput) -> list[ChatLogprob] | UnsetType:
    """Format the log-probabilities of new tokens, where the client wants them."""
    if completion.logprobs is None or not prepared.body.logprobs:
        return UNSET
    formatter = LogprobsFormatter(prepared.state)
    return formatter.chat(completion.token_ids, completion.logprobs, prepared.body.top_logprobs or 0).content or UNSET


def whole_calls(deltas: list[CallDelta]) -> list[Call]:
    """The calls that pieces make together, without those that were cut off: their arguments are no object."""
    texts: dict[int, str] = {}
    heads: dict[int, CallDelta] = {}
    for delta in deltas:
        texts[delta.index] = texts.get(delta.index, "") + delta.arguments
        if delta.id is not None:
            heads[delta.index] = delta
    calls: list[Call] = []
    for index, head in sorted(heads.items()):
        try:
            arguments = json.loads(texts[index])
        except ValueError:
            continue
        if isinstance(arguments, dict):
            calls.append(Call(head.id or "", CallFunction(head.name or "", arguments, len(calls))))
    return calls


def timestamp(seconds: float | None = None) -> str:
    """A time (seconds since the epoch; None: now) as Ollama writes it, to the millisecond."""
    return _written(int(1e3 * (time.time() if seconds is None else seconds)))


@lru_cache(maxsize=1)  # the lines of all streams in one step have the same
def _written(milliseconds: int) -> str:
    moment = datetime.fromtimestamp(milliseconds / 1e3, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def durations(began: float, metrics: RequestMetrics | None) -> dict[str, int]:
    """The durations of a request that began at that time (seconds since the epoch): reading the prompt, queue
    included; generating; and as load_duration all the rest, so that they sum up to the total. Each at least 1."""
    total = time.time() - began
    prompt = answer = 0.0
    if metrics is not None and metrics.first_token_time is not None:
        prompt = max(0.0, metrics.first_token_time - metrics.arrival_time)
        answer = max(0.0, (metrics.last_token_time or metrics.first_token_time) - metrics.first_token_time)
    names = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
    values = (total, total - prompt - answer, prompt, answer)
    return {name: max(1, round(value * 1e9)) for name, value in zip(names, values, strict=True)}
