"""``octavo bench serve``: load any OpenAI-compatible server and print throughput and latencies."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from octavo.bench.client import BACKENDS, RequestResult, make_body, send
from octavo.bench.datasets import SampleRequest, add_dataset_arguments, load_dataset
from octavo.bench.progress import progress_bar
from octavo.bench.report import METRICS, Report, parse_goodput, plot_timeline
from octavo.errors import ConfigError
from octavo.fetch.sources import resolve_model
from octavo.text.tokenizer import Tokenizer

_MODELS_TIMEOUT = 2.5  # seconds for GET /v1/models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `octavo bench serve`."""
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
        "--tokenizer", help="Model whose tokenizer makes the prompts (default: --model's, else the embedded model's)"
    )
    server.add_argument(
        "--ready-check-timeout-sec", type=float, default=0,
        help="Seconds to wait for a server that is not ready yet (default: 0)",
    )  # fmt: skip
    add_dataset_arguments(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--request-rate", type=float, default=math.inf, help="Requests per second (default: all at once)")
    load.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="Burstiness of arrivals. 1: Poisson process; lower: burstier (default: 1)",
    )
    load.add_argument(
        "--ramp-up-strategy",
        choices=("linear", "exponential"),
        help="Change the request rate during the run (default: none)",
    )
    load.add_argument("--ramp-up-start-rps", type=float, help="Request rate at the start of the ramp (default: none)")
    load.add_argument("--ramp-up-end-rps", type=float, help="Request rate at the end of the ramp (default: none)")
    load.add_argument("--max-concurrency", type=int, help="Maximum number of concurrent requests (default: no limit)")
    load.add_argument("--num-warmups", type=int, default=1, help="Requests before the measurement (default: 1)")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--ignore-eos", action="store_true", help="Always generate the full length (default: off)")
    for name, kind in {"temperature": float, "top-p": float, "min-p": float, "top-k": int}.items():
        text = f"{name.replace('-', '_')} of every request (default: the server's)"
        sampling.add_argument(f"--{name}", type=kind, help=text)
    sampling.add_argument("--logprobs", type=int, help="Log-probabilities per token in answers (default: none)")
    sampling.add_argument(
        "--extra-body",
        type=json.loads,
        default={},
        metavar="JSON",
        help="Further fields of the request body (default: none)",
    )
    out = parser.add_argument_group("results")
    out.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="Report the rate of requests that meet these targets (default: none)",
    )
    out.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        help="Metrics to print, comma separated: ttft, tpot, itl, e2el (default: ttft,tpot,itl)",
    )
    out.add_argument("--metric-percentiles", default="99", help="Percentiles to print, comma separated (default: 99)")
    out.add_argument("--save-result", action="store_true", help="Write the figures as JSON (default: off)")
    out.add_argument(
        "--save-detailed", action="store_true", help="Write every request's times and text, too (default: off)"
    )
    out.add_argument("--append-result", action="store_true", help="Append to the JSON file (default: overwrite it)")
    out.add_argument(
        "--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="Further entries of the JSON (default: none)"
    )
    out.add_argument("--result-dir", default=".", help="Folder of the JSON file (default: the current one)")
    out.add_argument("--result-filename", help="Name of the JSON file (default: from the run's settings)")
    out.add_argument(
        "--plot-timeline",
        metavar="PNG",
        nargs="?",
        const="timeline.png",
        help="Draw a timeline of all requests into this file, timeline.png if none is named (default: off)",
    )
    out.add_argument("--disable-tqdm", action="store_true", help="Show no progress bar (default: off)")


def run(args: argparse.Namespace) -> int:
    """Load the server and print a report. The exit status is 1 if no request succeeded. Raises ConfigError."""
    metrics = tuple(args.percentile_metrics.split(","))
    if unknown := set(metrics) - set(METRICS):
        raise ConfigError(f"--percentile-metrics must be of {', '.join(METRICS)}, got {', '.join(sorted(unknown))}")
    goodput = parse_goodput(args.goodput)
    delays(args, 1)  # raises before anything is sent
    model = _find_model(args)
    tokenizer = args.tokenizer or (args.model if args.served_model_name else None)
    samples = load_dataset(args, _load_tokenizer(tokenizer))
    results, duration = asyncio.run(_run(args, samples, model))
    report = Report(
        results, duration, goodput, tuple(float(p) for p in args.metric_percentiles.split(",")), metrics,
        args.max_concurrency, args.request_rate,
    )  # fmt: skip
    print(report)
    for error in sorted({r.error for r in results if r.error})[:5]:
        print("error:", error)
    if args.save_result or args.save_detailed or args.append_result:
        when = datetime.now().strftime("%Y%m%d-%H%M%S")
        path = Path(args.result_dir) / (args.result_filename or f"{args.backend}-{args.request_rate}qps-{when}.json")
        about: dict[str, Any] = {"date": when, "backend": args.backend, "num_prompts": args.num_prompts}
        about |= {"model_id": args.served_model_name or args.model, "tokenizer_id": tokenizer}
        about |= {"request_rate": str(args.request_rate), "max_concurrency": args.max_concurrency}
        about |= {"burstiness": args.burstiness}
        report.save(path, about | pairs(args.metadata, "--metadata"), args.save_detailed, args.append_result)
        print("saved", path)
    if args.plot_timeline:
        plot_timeline(report, Path(args.plot_timeline))
        print("drew", args.plot_timeline)
    return 0 if report.completed else 1


def _load_tokenizer(model: str | None) -> Tokenizer:
    """That of a model, None: the embedded one, for which no weights are fetched; a folder may hold nothing else."""
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


def delays(args: argparse.Namespace, count: int) -> list[float]:
    """Seconds from the start at which each request is sent. Gaps are gamma distributed with shape ``--burstiness``."""
    ramp = args.ramp_up_strategy
    if ramp and not (args.ramp_up_start_rps and args.ramp_up_end_rps):
        raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, both above 0")
    if args.request_rate <= 0 or args.burstiness <= 0:
        raise ConfigError("--request-rate and --burstiness must be above 0")
    rng = random.Random(args.seed)
    at, times = 0.0, []
    for i in range(count):
        times.append(at)
        rate = args.request_rate
        if ramp:
            share, start, end = i / max(count - 1, 1), args.ramp_up_start_rps, args.ramp_up_end_rps
            rate = start + (end - start) * share if ramp == "linear" else start * (end / start) ** share
        if math.isfinite(rate):
            at += rng.gammavariate(args.burstiness, 1 / (rate * args.burstiness))
    return times


def _connection(args: argparse.Namespace) -> dict[str, Any]:
    """What every client of the server is made with."""
    headers = pairs(args.header, "--header")
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"
    base_url = args.base_url or f"http://{f'[{args.host}]' if ':' in args.host else args.host}:{args.port}"
    return {"base_url": base_url, "headers": headers, "verify": not args.insecure, "trust_env": False}


def _find_model(args: argparse.Namespace) -> str:
    """The name to ask for: as given, else the first that the server lists. Raises ConfigError when no server answers,
    at once or after --ready-check-timeout-sec."""
    deadline = time.monotonic() + args.ready_check_timeout_sec
    connection = _connection(args)
    given = args.served_model_name or args.model
    try:
        client = httpx.Client(**connection, timeout=_MODELS_TIMEOUT)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--base-url {args.base_url!r} is no address: {error}") from None
    with client:
        while True:
            try:
                response = client.get("/v1/models")
                if given or response.status_code == 200:
                    return given or str(response.json()["data"][0]["id"])
                problem = f"it answered HTTP {response.status_code} to /v1/models; name the model with --model"
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem = f"{error or type(error).__name__}; start one with `octavo serve`, or give --host and --port"
            except (ValueError, KeyError, IndexError, TypeError):
                problem = "it lists no models; name one with --model"
            if time.monotonic() >= deadline:
                raise ConfigError(f"no server at {connection['base_url']}: {problem}")
            time.sleep(0.2)


async def _run(args: argparse.Namespace, samples: list[SampleRequest], model: str) -> tuple[list[RequestResult], float]:
    options = {
        name: value
        for name in ("temperature", "top_p", "top_k", "min_p", "logprobs")
        if (value := getattr(args, name)) is not None
    }
    options |= ({"ignore_eos": True} if args.ignore_eos else {}) | args.extra_body
    chat = args.backend == "openai-chat"
    endpoint = args.endpoint or BACKENDS[args.backend]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(None, connect=30)
    async with httpx.AsyncClient(**_connection(args), timeout=timeout, limits=limits) as client:

        async def one(sample: SampleRequest, began: float) -> RequestResult:
            return await send(client, endpoint, make_body(sample, model, chat, options), sample, began)

        for sample in samples[: args.num_warmups]:
            warm = await one(sample, time.perf_counter())
            if not warm.success:
                raise ConfigError(f"the first request failed: {warm.error}")
        with progress_bar("Requests", len(samples), enabled=not args.disable_tqdm) as advance:
            return await _send_all(args, samples, one, advance)


async def _send_all(
    args: argparse.Namespace,
    samples: list[SampleRequest],
    one: Callable[[SampleRequest, float], Any],
    advance: Callable[[], None],
) -> tuple[list[RequestResult], float]:
    slots = asyncio.Semaphore(args.max_concurrency or len(samples))
    began = time.perf_counter()

    async def at(when: float, sample: SampleRequest) -> RequestResult:
        await asyncio.sleep(max(0.0, began + when - time.perf_counter()))
        async with slots:
            result: RequestResult = await one(sample, began)
        advance()
        return result

    results = await asyncio.gather(*map(at, delays(args, len(samples)), samples))
    return results, time.perf_counter() - began
