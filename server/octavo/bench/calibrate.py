"""Measures a live server for about a minute, for `octavo plan --calibrate URL`."""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable

import httpx
import uvloop

from octavo.bench import serve
from octavo.bench.client import RequestResult
from octavo.bench.datasets import load_dataset
from octavo.bench.load import find_model, find_tokenizer, measure
from octavo.errors import ConfigError
from octavo.memory.dry_run import Plan
from octavo.plan.speed import Point, Speed, fit_speed

SECONDS = 60.0  # about, in all
SHORT, MIDDLE, LONG, ANSWER = 32, 256, 1024, 64  # tokens
USERS = (4, 8, 16)  # at the same time: kernels take other ways for few rows than for many
_TIMEOUT = 5.0


def server_blocks(url: str, api_key: str | None = None) -> tuple[int, int] | None:
    """Number and size of the KV cache's blocks, as /metrics has them; None: it does not say. Raises ConfigError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(trust_env=False, timeout=_TIMEOUT, headers=headers) as client:
            text = client.get(f"{url}/metrics").text
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"no server at {url}: {error or type(error).__name__}; start one with octavo serve") from None
    line = next((line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")), "")
    found = {name: re.search(rf'\b{name}="(\d+)"', line) for name in ("num_gpu_blocks", "block_size")}
    number, size = found["num_gpu_blocks"], found["block_size"]
    return (int(number[1]), int(size[1])) if number and size else None


def calibrate(
    url: str, plan: Plan, say: Callable[[str], None], api_key: str | None = None
) -> tuple[Speed, list[Point]]:
    """The speed of the device under the server at ``url``, whose plan is ``plan``. Raises ConfigError where there is no
    such server, or it fails."""
    room = plan.config.scheduler.max_model_len
    answer = max(2, min(ANSWER, room // 4))
    long = max(SHORT + 2, min(LONG, room - answer - 8))
    middle = max(SHORT + 1, min(MIDDLE, (SHORT + long) // 2))
    most = max(2, plan.config.scheduler.max_num_seqs)
    several = sorted({min(users, most) for users in USERS})
    asked = [(1, SHORT), *((users, SHORT) for users in several), (1, middle), (1, long)]
    bench = Bench(url, api_key, SECONDS / (len(asked) + 1))
    points = []
    for users, context in asked:
        points.append(bench.point(users, context, answer))
        say(f"measured {_said(points[-1])}")
    return fit_speed(plan, points), points


def _said(point: Point) -> str:
    return (
        f"{point.users} users, {point.context} + {point.output} tokens: {point.tokens_per_second:,.0f} tokens a "
        f"second, first token after {point.ttft * 1e3:,.0f} ms, {point.itl * 1e3:,.1f} ms between tokens"
    )


class Bench:
    """Closed loops of users, each for about ``seconds``."""

    def __init__(self, url: str, api_key: str | None, seconds: float) -> None:
        self._seconds, self._number = seconds, 0
        self._parser = argparse.ArgumentParser()
        serve.add_arguments(self._parser)
        self._argv = ["--base-url", url, "--ignore-eos", "--disable-tqdm", "--temperature", "0"]
        self._argv += ["--api-key", api_key] if api_key else []
        self._model, origin = find_model(self._parse())
        _, self._tokenizer = find_tokenizer(self._parse(), origin)

    def point(self, users: int, context: int, output: int) -> Point:
        """Medians, once one round has said how long requests take."""
        _, duration = self._run(users, users, context, output)
        rounds = max(4, min(50, round(self._seconds / max(duration, 1e-3))))
        results, duration = self._run(users, users * rounds, context, output)
        gaps = [gap for result in results for gap in result.itls]
        tokens = sum(result.output_tokens for result in results)
        ttft = statistics.median(result.ttft for result in results)
        return Point(
            users,
            round(statistics.mean(result.prompt_len for result in results)),
            output,
            ttft,
            statistics.median(gaps) or statistics.mean(gaps),
            tokens / duration,  # many come in one piece
        )

    def _run(self, users: int, count: int, context: int, output: int) -> tuple[list[RequestResult], float]:
        self._number += 1  # prompts that nobody has sent: none is in a prefix cache
        seed = str((time.time_ns() + self._number) % (1 << 31))
        args = self._parse(
            "--num-prompts",
            str(count),
            "--random-input-len",
            str(context),
            "--random-output-len",
            str(output),
            "--max-concurrency",
            str(users),
            "--seed",
            seed,
        )
        results, duration = uvloop.run(measure(args, load_dataset(args, self._tokenizer), self._model, []))
        failed = [result.error for result in results if not result.success]
        if failed:
            raise ConfigError(f"a request failed while calibrating: {failed[0]}")
        return results, duration

    def _parse(self, *argv: str) -> argparse.Namespace:
        return self._parser.parse_args([*self._argv, *argv])
