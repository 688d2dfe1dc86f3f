"""A closed loop of users on an OpenAI-compatible server: each sends its next request when its last one has ended.

The client is that of ``octavo bench serve``, the same for every engine.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from octavo.bench.client import RequestResult, make_body, read_result
from octavo.bench.datasets import SampleRequest, add_dataset_arguments, load_dataset
from octavo.bench.http_client import Exchange, HTTPClient
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
    def of(cls, users: int, answers: Sequence[RequestResult], seconds: float) -> Level:
        good = [answer for answer in answers if not answer.error]
        bad = [answer.error for answer in answers if answer.error]
        tokens = sum(answer.output_tokens for answer in good)
        ttfts = [1e3 * answer.ttft for answer in good]
        gaps = [1e3 * gap for answer in good for gap in answer.itls]
        return cls(
            users,
            len(answers),
            seconds,
            tokens / seconds,
            percentile(ttfts, 50),
            percentile(ttfts, 99),
            percentile(gaps, 50),
            percentile(gaps, 99),
            (len(gaps) + len(good)) / max(1, tokens),
            good[0].prompt_len if good else 0,
            len(bad),
            bad[0] if bad else "",
        )


def run_level(
    port: int,
    model: str,
    prompts: Sequence[str],
    users: int,
    output_tokens: int,
    timeout: float = 240,
    options: Mapping[str, Any] | None = None,
) -> Level:
    """Each user sends its share of ``prompts``, one after the other. Greedy unless ``options``, fields of the requests,
    say otherwise; always the full length."""

    options = {"temperature": 0, "ignore_eos": True} | dict(options or {})
    client = HTTPClient(f"http://127.0.0.1:{port}", {})

    async def user(mine: Sequence[str]) -> list[Exchange]:
        samples = [SampleRequest(prompt, [], output_tokens) for prompt in mine]
        return [await client.post("/v1/completions", make_body(s, model, False, options)) for s in samples]

    async def everybody() -> tuple[list[Exchange], float]:
        started = time.perf_counter()
        async with asyncio.timeout(timeout):
            answers = await asyncio.gather(*(user(prompts[i::users]) for i in range(users)))
        client.close()
        return [answer for some in answers for answer in some], time.perf_counter() - started

    exchanges, seconds = uvloop.run(everybody())
    return Level.of(users, [read_result(exchange, 0, 0.0) for exchange in exchanges], seconds)


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
