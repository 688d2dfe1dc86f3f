"""Bodies of Ollama's responses. Durations in nanoseconds."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from octavo.entrypoints.generation.logprobs import ChatLogprob
from octavo.interface.outputs import RequestMetrics


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


class Details(Struct):
    """What kind of model it is."""

    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    parent_model: str = ""


class ModelEntry(Struct):
    """One name of the served model. ``size``: bytes of its weights."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class Tags(Struct):
    """The answer of /api/tags."""

    models: list[ModelEntry]


class RunningEntry(Struct):
    """A name of the model, which is loaded. ``size_vram``: bytes of its weights on a GPU."""

    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class Running(Struct):
    """The answer of /api/ps."""

    models: list[RunningEntry]


class Show(Struct):
    """The answer of /api/show."""

    license: str
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class VersionAnswer(Struct):
    """The answer of /api/version."""

    version: str


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
