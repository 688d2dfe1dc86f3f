"""One streaming request to any OpenAI-compatible server, timed chunk by chunk."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from octavo.bench.datasets import SampleRequest
from octavo.bench.http_client import Exchange

BACKENDS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass
class RequestResult:
    """Times in seconds; ``start`` counts from the beginning of the run."""

    prompt_len: int
    start: float = 0.0
    success: bool = False
    error: str = ""
    output_tokens: int = 0
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list)  # between chunks
    latency: float = 0.0
    queued: float = 0.0  # waited for one of --max-concurrency before it was sent
    text: str = ""


def make_body(
    sample: SampleRequest, model: str, chat: bool, options: dict[str, Any], said: Sequence[str] = ()
) -> dict[str, Any]:
    """The JSON body of a streamed request for ``sample``. ``options``: further fields; ``said`` before in the same
    conversation: questions and answers in turn."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": sample.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if chat:
        contents = enumerate((*said, sample.content or sample.prompt))
        body["messages"] = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in contents]
    else:
        body["prompt"] = "".join((*said, sample.prompt))
    return body | options


def read_result(
    exchange: Exchange, prompt_len: int, began: float, count_tokens: Callable[[str], int] | None = None
) -> RequestResult:
    """Parse a streamed answer and its times. ``began``: the time of `time.perf_counter` when the run began;
    ``count_tokens`` counts the tokens of a text for servers that do not report them.

    Times are those of ``vllm bench serve``: every event that has choices counts once, however many tokens the server
    packed into it, and also if its text is empty; an answer ends with the last of them.
    """
    result = RequestResult(prompt_len, start=exchange.started - began, error=exchange.error)
    if exchange.status not in (0, 200):
        result.error = f"HTTP {exchange.status}: {exchange.body.decode(errors='replace')[:300]}"
    if result.error:
        return result
    last = None
    try:
        for event, at in _events(exchange.pieces):
            if "error" in event:
                result.error = str(event["error"])[:300]
                return result
            if usage := event.get("usage"):
                result.output_tokens, result.prompt_len = usage["completion_tokens"], usage["prompt_tokens"]
            if not (choices := event.get("choices")):
                continue
            if last is None:
                result.ttft = at - exchange.started
            else:
                result.itls.append(at - last)
            last = at
            result.text += choices[0].get("text") or (choices[0].get("delta") or {}).get("content") or ""
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        result.error = f"the answer is no stream of completions: {type(error).__name__}: {error}"
        return result
    if last is None:
        result.error = "the stream ended without a token"
        return result
    result.success, result.latency = True, last - exchange.started
    if not result.output_tokens:
        result.output_tokens = count_tokens(result.text) if count_tokens else len(result.itls) + 1
    return result


def _events(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[dict[str, Any], float]]:
    """The JSON of each server-sent event, and the time when its last byte came."""
    body, ends = b"".join(piece for _, piece in pieces), list(accumulate(len(piece) for _, piece in pieces))
    position = 0
    for line in body.splitlines(keepends=True):
        position += len(line)
        data = line.strip()
        if data.startswith(b"data:") and data != b"data: [DONE]":
            yield json.loads(data[5:]), pieces[bisect_left(ends, position)][0]
