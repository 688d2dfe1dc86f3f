"""One streaming request to any OpenAI-compatible server, timed chunk by chunk."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from octavo.bench.datasets import SampleRequest

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
    text: str = ""


def make_body(sample: SampleRequest, model: str, chat: bool, options: dict[str, Any]) -> dict[str, Any]:
    """The JSON body of a streamed request for ``sample``; ``options`` are further fields."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": sample.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body["messages" if chat else "prompt"] = [{"role": "user", "content": sample.prompt}] if chat else sample.prompt
    return body | options


async def send(
    client: httpx.AsyncClient, endpoint: str, body: dict[str, Any], sample: SampleRequest, began: float
) -> RequestResult:
    """Send and read to the end; what goes wrong is in the result, never raised."""
    result = RequestResult(prompt_len=sample.prompt_len)
    started = last = time.perf_counter()
    result.start = started - began
    try:
        async with client.stream("POST", endpoint, json=body) as response:
            if response.status_code != 200:
                result.error = f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')[:300]}"
                return result
            async for line in response.aiter_lines():
                if not line.startswith("data:") or line == "data: [DONE]":
                    continue
                event = json.loads(line[5:])
                now = time.perf_counter()
                if "error" in event:
                    result.error = str(event["error"])[:300]
                    return result
                if usage := event.get("usage"):
                    result.output_tokens = usage["completion_tokens"]
                    result.prompt_len = usage["prompt_tokens"]
                for choice in event.get("choices") or ():
                    text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                    if not text and choice.get("finish_reason") is not None:
                        continue
                    if result.ttft == 0.0:
                        result.ttft = now - started
                    else:
                        result.itls.append(now - last)
                    last = now
                    result.text += text
        result.latency = last - started
        result.output_tokens = result.output_tokens or len(result.itls) + 1
        result.success = result.ttft > 0.0
        if not result.success:
            result.error = "the stream ended without a token"
    except (httpx.HTTPError, ValueError, KeyError, OSError) as error:
        result.error = f"{type(error).__name__}: {error}"
    return result
