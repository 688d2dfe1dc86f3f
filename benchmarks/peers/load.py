"""A closed loop of users on an OpenAI-compatible server: each sends its next request when its last one has ended.

It shares the machine with what it measures, so it costs next to nothing: while the clock runs, bytes are kept with the
time they came and nothing else is done; what they say is read afterwards. The same for every engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.datasets import add_dataset_arguments, load_dataset
from octavo.bench.report import percentile
from octavo.text.tokenizer import Tokenizer


def make_prompts(tokenizer: Tokenizer, count: int, length: int, seed: int, prefix: int = 0) -> list[str]:
    """Random words of ``length`` tokens each, after ``prefix`` tokens that all of them share."""
    parser = argparse.ArgumentParser()
    add_dataset_arguments(parser)
    words = ["--num-prompts", str(count), "--input-len", str(length), "--random-prefix-len", str(prefix)]
    samples = load_dataset(parser.parse_args([*words, "--seed", str(seed)]), tokenizer)
    return [sample.prompt for sample in samples]


@dataclass
class Answer:
    """One request's life. ``pieces``: (seconds since it was sent, bytes)."""

    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str = ""
    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)  # seconds between chunks with text
    output_tokens: int = 0
    prompt_tokens: int = 0


class _Stream(asyncio.Protocol):
    def __init__(self, request: bytes, answer: Answer, started: float) -> None:
        self._request, self._answer, self._started = request, answer, started
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._answer.pieces.append((time.perf_counter() - self._started, data))
        if b"[DONE]" in data:
            self._transport.close()
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if error:
            self._answer.error = str(error)
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def send(port: int, body: dict[str, Any]) -> Answer:
    """Send and keep what comes back, to the end; what goes wrong is in the answer."""
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    answer, started = Answer(), time.perf_counter()
    try:
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(
            lambda: _Stream(head.encode() + content, answer, started), "127.0.0.1", port
        )
        await stream.ended
    except OSError as error:
        answer.error = str(error)
    return answer


def read(answer: Answer) -> Answer:
    """Fill in what the bytes say. A chunk with text counts once, however many tokens the server packed into it."""
    raw = b"".join(piece for _, piece in answer.pieces)
    pieces, answer.pieces = answer.pieces, []
    head, _, body = raw.partition(b"\r\n\r\n")
    if answer.error or not head.startswith(b"HTTP/1.1 200"):
        answer.error = answer.error or raw.decode(errors="replace")[-300:] or "the connection was closed"
        return answer
    ends, total = [], 0
    for _, piece in pieces:
        total += len(piece)
        ends.append(total)
    last = None
    chunked = b"transfer-encoding: chunked" in head.lower()
    for text, end in _events(body, chunked):
        event = json.loads(text)
        if "error" in event:
            answer.error = str(event["error"])[:300]
            return answer
        if usage := event.get("usage"):
            answer.output_tokens, answer.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        for choice in event.get("choices") or ():
            if not choice.get("text") and choice.get("finish_reason") is not None:
                continue  # a chunk that only says that it was the last
            at = pieces[bisect_left(ends, len(head) + 4 + end)][0]
            if last is None:
                answer.ttft = at
            else:
                answer.gaps.append(at - last)
            last = at
    if last is None:
        answer.error = "the stream ended without a token"
    return answer


def _events(body: bytes, chunked: bool) -> Iterator[tuple[bytes, int]]:
    """Server-sent events' data and where, in ``body``, the last byte of each lies (counted from one)."""
    text, places = b"", [(0, 0)]  # places: (offset in text, offset in body) where a run of both begins
    if chunked:
        parts, at = [], 0
        size_of_text = 0
        while at < len(body):
            line_end = body.find(b"\r\n", at)
            if line_end < 0:
                break
            size = int(body[at:line_end].partition(b";")[0], 16)
            begin = line_end + 2
            places.append((size_of_text, begin))
            parts.append(body[begin : begin + size])
            size_of_text += size
            at = begin + size + 2
            if size == 0:
                break
        text = b"".join(parts)
    else:
        text = body
    starts = [place[0] for place in places]
    at = 0
    while (end := text.find(b"\n\n", at)) >= 0:
        block = text[at:end].strip()
        at = end + 2
        if block.startswith(b"data:") and b"[DONE]" not in block:
            # The latest run that begins before the event's end.
            run = bisect_left(starts, end + 1) - 1
            yield block[5:], places[run][1] + end + 1 - places[run][0]


@dataclass
class Level:
    """What ``users`` users at once got; times in milliseconds."""

    users: int
    requests: int
    seconds: float
    tok_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    chunks_per_token: float
    prompt_tokens: int
    errors: int
    error: str

    @classmethod
    def of(cls, users: int, answers: Sequence[Answer], seconds: float) -> Level:
        good = [answer for answer in answers if not answer.error]
        bad = [answer.error for answer in answers if answer.error]
        tokens = sum(answer.output_tokens for answer in good)
        ttfts = [1e3 * answer.ttft for answer in good]
        gaps = [1e3 * gap for answer in good for gap in answer.gaps]
        return cls(
            users, len(answers), seconds, tokens / seconds, percentile(ttfts, 50), percentile(ttfts, 99),
            percentile(gaps, 50), percentile(gaps, 99), (len(gaps) + len(good)) / max(1, tokens),
            good[0].prompt_tokens if good else 0, len(bad), bad[0] if bad else "",
        )  # fmt: skip


def run_level(
    port: int, model: str, prompts: Sequence[str], users: int, output_tokens: int, timeout: float = 240
) -> Level:
    """Each user sends its share of ``prompts``, one after the other. Greedy, always the full length."""

    async def user(mine: Sequence[str]) -> list[Answer]:
        return [
            await send(
                port,
                {
                    "model": model, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "stream": True,
                    "ignore_eos": True, "stream_options": {"include_usage": True},
                },
            )
            for prompt in mine
        ]  # fmt: skip

    async def everybody() -> tuple[list[Answer], float]:
        started = time.perf_counter()
        async with asyncio.timeout(timeout):
            answers = await asyncio.gather(*(user(prompts[i::users]) for i in range(users)))
        return [answer for some in answers for answer in some], time.perf_counter() - started

    answers, seconds = _run(everybody())
    return Level.of(users, [read(answer) for answer in answers], seconds)


def _run(main: Any) -> Any:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("port", type=int)
    parser.add_argument("model")
    parser.add_argument("--users", type=int, default=1)
    parser.add_argument("--requests-per-user", type=int, default=2)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--prefix-len", type=int, default=0)
    args = parser.parse_args()
    from octavo.fetch.sources import resolve_model

    tokenizer = Tokenizer.from_files(resolve_model(None, progress=False))
    prompts = make_prompts(
        tokenizer, args.users * args.requests_per_user, args.input_len, int(time.time()), args.prefix_len
    )
    print(run_level(args.port, args.model, prompts, args.users, args.output_len))


if __name__ == "__main__":
    main()
