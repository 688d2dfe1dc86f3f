"""Requests to an OpenAI-compatible server: which, how many at once, and when; and what comes back."""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from octavo.bench.client import BACKENDS, RequestResult, make_body, read_result
from octavo.bench.datasets import SampleRequest
from octavo.bench.http_client import Exchange, HTTPClient
from octavo.bench.progress import progress_bar
from octavo.errors import ConfigError, OctavoError
from octavo.fetch.model_names import DEFAULT_MODEL
from octavo.fetch.sources import resolve_model
from octavo.text.tokenizer import Tokenizer

_MODELS_TIMEOUT = 2.5  # seconds for GET /v1/models
_SAMPLING = ("temperature", "top_p", "min_p", "top_k", "frequency_penalty", "presence_penalty", "repetition_penalty")


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which server to load."""
    server = parser.add_argument_group("server")
    server.add_argument("--backend", choices=sorted(BACKENDS), default="openai", help="API to call (default: openai)")
    server.add_argument("--base-url", help="Base URL of the server (default: http://HOST:PORT)")
    server.add_argument("--host", default="127.0.0.1", help="Host of the server (default: 127.0.0.1)")
    server.add_argument("--port", type=int, default=8000, help="Port of the server (default: 8000)")
    server.add_argument("--endpoint", help="Path of the API (default: the backend's)")
    server.add_argument(
        "--header", nargs="*", default=[], metavar="KEY=VALUE", help="HTTP headers to send (default: none)"
    )
    server.add_argument(
        "--api-key",
        type=str.strip,
        metavar="KEY",
        default=os.environ.get("OPENAI_API_KEY"),
        help="API key (default: OPENAI_API_KEY of the environment, else none)",
    )
    server.add_argument("--insecure", action="store_true", help="Do not verify the server's certificate (default: off)")
    server.add_argument("--model", help="Model name in requests (default: the first that the server lists)")
    server.add_argument(
        "--served-model-name",
        help="Model name in requests, if --model names the model of the tokenizer (default: --model)",
    )
    server.add_argument(
        "--tokenizer",
        help="Model whose tokenizer makes the prompts (default: --model or the model that the server reports, if it is "
        "available locally, else the embedded model)",
    )
    server.add_argument(
        "--request-id-prefix",
        default="",
        metavar="TEXT",
        help="Prefix of X-Request-Id; a number follows it (default: none)",
    )
    server.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=0,
        help="Seconds to wait for a server that is not ready yet (default: 0)",
    )


def add_arrival_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say when requests are sent."""
    load = parser.add_argument_group("load")
    load.add_argument("--request-rate", type=float, default=math.inf, help="Requests per second (default: all at once)")
    load.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="Burstiness of arrivals. 1: Poisson process; lower: burstier; inf: even (default: 1)",
    )
    load.add_argument(
        "--ramp-up-strategy",
        choices=("linear", "exponential"),
        help="Change the request rate during the run (default: none)",
    )
    load.add_argument("--ramp-up-start-rps", type=float, help="Request rate at the start of the ramp (default: none)")
    load.add_argument("--ramp-up-end-rps", type=float, help="Request rate at the end of the ramp (default: none)")
    load.add_argument("--max-concurrency", type=int, help="Maximum number of concurrent requests (default: no limit)")
    load.add_argument(
        "--num-warmups",
        type=int,
        default=0,
        help="Number of times to send the first request before the measurement (default: 0)",
    )
    load.add_argument(
        "--ignore-eos",
        action="store_true",
        help="Always generate the full length (default: off; always on for random prompts)",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what else is in every request."""
    sampling = parser.add_argument_group("sampling")
    for name in _SAMPLING:
        text = f"{name} of every request (default: the server's)"
        sampling.add_argument(f"--{name.replace('_', '-')}", type=int if name == "top_k" else float, help=text)
    sampling.add_argument("--logprobs", type=int, help="Log-probabilities per token in answers (default: none)")
    sampling.add_argument(
        "--extra-body",
        type=json.loads,
        default={},
        metavar="JSON",
        help="Further fields of the request body (default: none)",
    )
    parser.add_argument("--disable-tqdm", action="store_true", help="Show no progress bar (default: off)")


def sampling_note(args: argparse.Namespace) -> str | None:
    """One line where no temperature is asked for: the server then draws, or does not, as it does for others."""
    if args.temperature is not None or "temperature" in args.extra_body:
        return None
    return (
        "sampling: no --temperature is given, so tokens are drawn as the server does by default, which may differ from "
        "server to server and from run to run; --temperature 0 takes the likeliest"
    )


def load_tokenizer(model: str | None) -> Tokenizer:
    """Load the tokenizer of a model, None: the embedded one, without its weights; a folder may hold nothing else."""
    if model is not None and (Path(model) / "tokenizer.json").is_file():
        return Tokenizer.from_directory(model)
    return Tokenizer.from_files(resolve_model(model, need_weights=False))


def pairs(texts: list[str], flag: str) -> dict[str, str]:
    """``KEY=VALUE`` texts as a dictionary. Raises ConfigError, naming ``flag``."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{flag} takes KEY=VALUE, got {text!r}")
        found[key] = value
    return found


def check_load(args: argparse.Namespace) -> None:
    """Raises ConfigError for flags of `add_arrival_arguments` that make no sense."""
    ramp = args.ramp_up_strategy
    if ramp and not min(args.ramp_up_start_rps or 0, args.ramp_up_end_rps or 0) > 0:
        raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, both above 0")
    if ramp and math.isfinite(args.request_rate):
        raise ConfigError("--ramp-up-strategy sets the rate: leave out --request-rate")
    if not ramp and (args.ramp_up_start_rps or args.ramp_up_end_rps):
        raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy linear or exponential")
    if not (args.request_rate > 0 and args.burstiness > 0):
        raise ConfigError("--request-rate and --burstiness must be above 0")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be at least 1, got {args.max_concurrency}")
    if args.num_warmups < 0:
        raise ConfigError(f"--num-warmups must be at least 0, got {args.num_warmups}")


def rates(args: argparse.Namespace, count: int) -> list[float]:
    """Requests per second at which each of ``count`` requests is sent."""
    if not args.ramp_up_strategy:
        return [args.request_rate] * count
    start, end = args.ramp_up_start_rps, args.ramp_up_end_rps
    shares = [i / max(count - 1, 1) for i in range(count)]
    if args.ramp_up_strategy == "linear":
        return [start + (end - start) * share for share in shares]
    return [start * (end / start) ** share for share in shares]


def delays(args: argparse.Namespace, count: int) -> list[float]:
    """Seconds from the start at which each request is sent.

    Gaps are gamma distributed with shape ``--burstiness``; without a ramp they are scaled so that the last request is
    sent after ``count`` / rate seconds, whatever the seed. For a seed they are those of ``vllm bench serve``.
    """
    rng = np.random.RandomState(args.seed % 2**32)

    def gap(rate: float) -> float:
        if math.isinf(rate):
            return 0.0
        return 1 / rate if math.isinf(args.burstiness) else rng.gamma(args.burstiness, 1 / (rate * args.burstiness))

    times = np.cumsum([gap(rate) for rate in rates(args, count)])
    if not args.ramp_up_strategy and times[-1] > 0:
        times *= count / args.request_rate / times[-1]
    found: list[float] = times.tolist()
    return found


def connection_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that all clients of the server share."""
    headers = pairs(args.header, "--header")
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"
    base_url = args.base_url or f"http://{f'[{args.host}]' if ':' in args.host else args.host}:{args.port}"
    return {"base_url": base_url, "headers": headers, "verify": not args.insecure}


def find_model(args: argparse.Namespace) -> tuple[str, str]:
    """The name to ask for, as given, else the first that the server lists, and whose tokenizer it has: --model, or what
    the server says that the model was made from. Raises ConfigError when no server answers, at once or after
    --ready-check-timeout-sec."""
    deadline = time.monotonic() + args.ready_check_timeout_sec
    connection = connection_of(args)
    given = args.served_model_name or args.model
    try:
        client = httpx.Client(**connection, trust_env=False, timeout=_MODELS_TIMEOUT)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--base-url {args.base_url!r} is no address: {error}") from None
    with client:
        while True:
            try:
                response = client.get("/v1/models")
                if given:
                    return given, args.model or given
                if response.status_code == 200:
                    card = response.json()["data"][0]
                    return str(card["id"]), str(card.get("root") or card["id"])
                problem = f"it answered HTTP {response.status_code} to /v1/models; name the model with --model"
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem = f"{error or type(error).__name__}; start one with `octavo serve`, or give --host and --port"
            except (ValueError, LookupError, TypeError, AttributeError):
                problem = "it lists no models; name one with --model"
            if time.monotonic() >= deadline:
                raise ConfigError(f"no server at {connection['base_url']}: {problem}")
            time.sleep(0.2)


def find_tokenizer(args: argparse.Namespace, origin: str) -> tuple[str | None, Tokenizer]:
    """Load the tokenizer of --tokenizer or of ``origin``; if it is not available locally, print so and use the
    embedded model's. Also return the name of its model; None for the embedded model."""
    if args.tokenizer:
        return args.tokenizer, load_tokenizer(args.tokenizer)
    try:
        return origin, load_tokenizer(origin)
    except OctavoError:
        print(
            f"the tokenizer of {origin} is not here: prompts are made with that of {DEFAULT_MODEL} and may be longer "
            "or shorter than asked for; --tokenizer names a model or folder",
            file=sys.stderr,
        )
        return None, load_tokenizer(None)


async def measure(
    args: argparse.Namespace,
    samples: list[SampleRequest],
    model: str,
    warmups: Sequence[SampleRequest],
    count_tokens: Callable[[str], int] | None = None,
) -> tuple[list[RequestResult], float]:
    """Send ``warmups``, as many at once as --max-concurrency allows, then ``samples``. Returns what came of them, in
    their order, and the seconds it took. ``count_tokens`` of an answer, for servers that do not tell. Raises
    ConfigError where not all of ``warmups`` succeed."""
    options = {name: value for name in (*_SAMPLING, "logprobs") if (value := getattr(args, name)) is not None}
    ignore_eos = args.ignore_eos or args.dataset_name in ("random", "random-mm")
    options |= ({"ignore_eos": True} if ignore_eos else {}) | args.extra_body
    chat, endpoint = args.backend == "openai-chat", args.endpoint or BACKENDS[args.backend]
    client = HTTPClient(**connection_of(args))
    numbers = itertools.count()

    async def one(sample: SampleRequest, said: Sequence[str] = ()) -> Exchange:
        headers = f"X-Request-Id: {args.request_id_prefix}{next(numbers)}\r\n" if args.request_id_prefix else ""
        return await client.post(endpoint, make_body(sample, model, chat, options, said), headers)

    def read(exchange: Exchange, sample: SampleRequest, began: float) -> RequestResult:
        return read_result(exchange, sample.prompt_len, began, count_tokens)

    try:
        slots = asyncio.Semaphore(args.max_concurrency or max(1, len(warmups)))
        warm = await asyncio.gather(*(_within(slots, one(sample)) for sample in warmups))
        for exchange, sample in zip(warm, warmups, strict=True):
            if not (result := read(exchange, sample, 0.0)).success:
                raise ConfigError(f"the first request failed: {result.error}")
        gc.collect()
        gc.freeze()  # what is here stays: no pause is spent on it while the clock runs
        with progress_bar("Requests", sum(map(_num_turns, samples)), enabled=not args.disable_tqdm) as advance:
            return await _send_all(args, samples, one, read, advance)
    finally:
        gc.unfreeze()
        client.close()


async def _within(slots: asyncio.Semaphore, exchange: Awaitable[Exchange]) -> Exchange:
    async with slots:
        return await exchange


def _num_turns(sample: SampleRequest) -> int:
    return 1 + (_num_turns(sample.follow_up) if sample.follow_up else 0)


async def _send_all(
    args: argparse.Namespace,
    samples: list[SampleRequest],
    one: Callable[[SampleRequest, list[str]], Awaitable[Exchange]],
    read: Callable[[Exchange, SampleRequest, float], RequestResult],
    advance: Callable[[], None],
) -> tuple[list[RequestResult], float]:
    """Send each sample when it is due, and what follows it when its answer is there. Answers are read once all have
    come, but for those that a conversation goes on from."""
    slots = asyncio.Semaphore(args.max_concurrency or len(samples))
    began = time.perf_counter()

    async def at(when: float, sample: SampleRequest | None) -> list[tuple[Exchange, SampleRequest, float]]:
        await asyncio.sleep(max(0.0, began + when - time.perf_counter()))
        due = time.perf_counter()
        said: list[str] = []
        exchanges: list[tuple[Exchange, SampleRequest, float]] = []
        async with slots:
            while sample is not None:
                exchange = await one(sample, said)
                exchanges.append((exchange, sample, exchange.started - due))
                advance()
                if sample.follow_up is not None:
                    answer = read(exchange, sample, began)
                    if not answer.success:
                        break
                    said += (sample.prompt, answer.text)
                sample, due = sample.follow_up, time.perf_counter()
        return exchanges

    found = await asyncio.gather(*map(at, delays(args, len(samples)), samples))
    duration = time.perf_counter() - began
    results = []
    for exchange, sample, queued in (one for some in found for one in some):
        results.append(read(exchange, sample, began))
        results[-1].queued = queued
    return results, duration
