"""What images cost: the same one again, images a second beside vLLM, and what text feels of them.

    python -m benchmarks images                  # ours, about 3 minutes on two cores
    python -m benchmarks images --peers          # and vLLM on the same checkpoints: its tokens, its images a second

Checkpoints are random (`image_checkpoints.py`): small ones for tokens, one of SmolVLM-256M's shape for time. Images are
smooth noise, each new to every server. Where two servers are compared both run all the time, and every round asks one
of them and then the other.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvloop
from PIL import Image

from benchmarks.image_checkpoints import checkpoint
from benchmarks.peers.cpus import better_dtype
from benchmarks.peers.engines import (
    Engine,
    peers_folder,
    serve_octavo,
    torchvision_folder,
    vllm_binary,
    vllm_environment,
)
from benchmarks.peers.server import Server, ServerError
from octavo.bench.client import RequestResult, make_body, read_result
from octavo.bench.datasets import SampleRequest
from octavo.bench.http_client import HTTPClient

FAMILIES = (
    "idefics3",
    "llava",
    "llava-next",
    "llava-onevision",
    "gemma3",
    "qwen2.5-vl",
    "qwen3-vl",
    "pixtral",
    "mistral3",
)
LENGTH = ("--max-model-len", "4096")
WORDS = "Describe this picture in a few words, and say what stands out in it."
PROMPTS, TOKENS = 20, 16
AGAIN_GOAL, SAME_GOAL, RATE_GOAL, TEXT_GOAL = 0.3, 18, 1.5, 0.98
TIE = 0.05  # nats between the two likeliest tokens, below which rounding decides


@dataclass
class Row:
    """One figure beside its goal."""

    name: str
    value: float
    goal: str
    met: bool | None  # None: there is no goal
    note: str

    def __str__(self) -> str:
        verdict = "" if self.met is None else "met" if self.met else "MISSED"
        return f"{self.name:<46}{self.value:>9.2f}  {self.goal:<9}{verdict:<8}{self.note}"


_seeds = itertools.count()


def picture(width: int = 640, height: int = 480, seed: int | None = None) -> dict[str, Any]:
    """An image, as a part of a message; a new one without ``seed``."""
    noise = np.random.default_rng(next(_seeds) if seed is None else seed).integers(0, 256, (9, 12, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def question(*images: dict[str, Any], words: str = WORDS) -> SampleRequest:
    return SampleRequest(words, [], 1, content=[*images, {"type": "text", "text": words}])


def ask(
    server: Server, requests: Sequence[SampleRequest], users: int, tokens: int = 1
) -> tuple[float, list[RequestResult]]:
    """Seconds, and what came of each request; so many at a time."""
    client = HTTPClient(f"http://127.0.0.1:{server.port}", {})
    waiting = list(reversed(requests))

    async def user() -> list[RequestResult]:
        done = []
        while waiting:
            sample = replace(waiting.pop(), output_len=tokens)
            body = make_body(sample, server.engine.model, True, {"temperature": 0, "ignore_eos": True})
            done.append(read_result(await client.post("/v1/chat/completions", body), 0, 0.0))
        return done

    async def everybody() -> list[list[RequestResult]]:
        return await asyncio.gather(*(user() for _ in range(users)))

    started = time.perf_counter()
    results = [result for some in uvloop.run(everybody()) for result in some]
    seconds = time.perf_counter() - started
    client.close()
    if failed := [result.error for result in results if result.error]:
        raise SystemExit(f"{server.engine.label}: {failed[0]}")
    return seconds, results


def again(server: Server, rounds: int) -> list[Row]:
    """Time to the first token for a new image, for the same request again, and for its image in another prompt."""
    firsts, seconds, others = [], [], []
    for number in range(rounds):
        image = picture()
        same, other = question(image), question(image, words=f"({number}) {WORDS}")
        other = replace(other, content=list(reversed(other.content or [])))
        for times, request in ((firsts, same), (seconds, same), (others, other)):
            times.append(ask(server, [request], 1)[1][0].ttft)
    first = statistics.median(firsts)
    rows = []
    for name, times in (
        ("TTFT: same request again / first", seconds),
        ("TTFT: same image, other prompt / first", others),
    ):
        ratio = statistics.median(b / a for a, b in zip(firsts, times, strict=True))
        note = f"{1000 * first:.0f} ms, then {1000 * statistics.median(times):.0f} ms"
        rows.append(Row(name, ratio, f"<= {AGAIN_GOAL}", ratio <= AGAIN_GOAL, note))
    return rows


def text_beside(plain: Server, vision: Server, rounds: int) -> Row:
    """Tokens a second of text alone, with the tower over without it."""
    requests = [replace(question(words=f"({n}) {WORDS}"), content=None) for n in range(4)]
    rates: dict[str, list[float]] = {plain.engine.variant: [], vision.engine.variant: []}
    for number in range(rounds):
        for server in (plain, vision) if number % 2 == 0 else (vision, plain):
            _, results = ask(server, requests, 2, 48)
            rates[server.engine.variant].append(
                sum(r.output_tokens - 1 for r in results) / sum(r.latency - r.ttft for r in results)
            )
    ratios = [b / a for a, b in zip(*rates.values(), strict=True)]
    ratio = statistics.median(ratios)
    note = f"({min(ratios):.2f} - {max(ratios):.2f}), {statistics.median(rates[vision.engine.variant]):.0f} tokens/s"
    return Row("text alone: with a tower / without", ratio, f">= {TEXT_GOAL}", ratio >= TEXT_GOAL, note)


def gaps(server: Server, images: int) -> list[Row]:
    """The longest gap between two tokens of a stream of text, alone and while images are read."""
    text = replace(question(), content=None, output_len=160)

    async def stream(images: int) -> RequestResult:
        client = HTTPClient(f"http://127.0.0.1:{server.port}", {})

        async def post(sample: SampleRequest, wait: float = 0.0) -> RequestResult:
            await asyncio.sleep(wait)
            body = make_body(sample, server.engine.model, True, {"temperature": 0, "ignore_eos": True})
            return read_result(await client.post("/v1/chat/completions", body), 0, 0.0)

        found = await asyncio.gather(post(text), *(post(question(picture()), 0.3) for _ in range(images)))
        client.close()
        return found[0]

    alone, busy = uvloop.run(stream(0)), uvloop.run(stream(images))
    seconds, _ = ask(server, [question(picture())], 1)
    return [
        Row("longest gap of a stream, ms", 1000 * max(alone.itls), "", None, "nobody else there"),
        Row(
            f"  while {images} images are read, ms",
            1000 * max(busy.itls),
            "",
            None,
            f"reading one alone takes {1000 * seconds:.0f} ms",
        ),
    ]


def rate(name: str, first: Server, second: Server, rounds: int, users: int, images: int) -> list[Row]:
    """Images a second, ours over theirs, and CPU time an image, theirs over ours; one image a request, one token an
    answer."""
    rates: list[list[float]] = [[], []]
    costs: list[list[float]] = [[], []]
    for number in range(rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            server, requests = (first, second)[which], [question(picture()) for _ in range(images)]
            before = server.cpu_seconds()
            rates[which].append(images / ask(server, requests, users)[0])
            costs[which].append((server.cpu_seconds() - before) / images)
    return [
        _ratio(f"images/s of vLLM's, {name}, {users} users", *rates, f">= {RATE_GOAL}"),
        _ratio("  vLLM's CPU time an image / ours, s", *reversed(costs), ""),
    ]


def _ratio(name: str, ours: list[float], theirs: list[float], goal: str) -> Row:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    middle = statistics.median(ratios)
    note = f"({min(ratios):.2f} - {max(ratios):.2f}), {statistics.median(ours):.3g} / {statistics.median(theirs):.3g}"
    return Row(name, middle, goal, middle >= RATE_GOAL if goal else None, note)


def answers(server: Server, requests: Sequence[SampleRequest]) -> list[list[tuple[str, float]]]:
    """Greedy tokens, each with how far it is ahead of the next likeliest, in nats."""
    found = []
    for request in requests:
        body = {
            "model": server.engine.model,
            "messages": [{"role": "user", "content": request.content}],
            "temperature": 0,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": 2,
            "return_tokens_as_token_ids": True,  # texts of pieces of characters differ between the two
        }
        answer = httpx.post(f"http://127.0.0.1:{server.port}/v1/chat/completions", json=body, timeout=300)
        answer.raise_for_status()
        entries = answer.json()["choices"][0]["logprobs"]["content"]
        found.append([(e["token"], _ahead(e["top_logprobs"])) for e in entries])
    return found


def _ahead(top: Sequence[dict[str, Any]]) -> float:
    best, second = sorted((entry["logprob"] for entry in top), reverse=True)[:2]
    return float(best - second)


def agreement(name: str, ours: Server, theirs: Server) -> Row:
    """How many answers are the same, token by token, and how near to a tie those that differ are where they part."""
    sizes = itertools.cycle([(64, 64), (640, 480), (300, 700), (97, 33)])
    requests = [question(picture(*next(sizes), seed=n), words=f"{WORDS} ({n})") for n in range(PROMPTS)]
    margins = []
    for a, b in zip(answers(ours, requests), answers(theirs, requests), strict=True):
        margins += [x[1] for x, y in zip(a, b, strict=True) if x[0] != y[0]][:1]
    same = PROMPTS - len(margins)
    far = sum(margin > TIE for margin in margins)
    note = (
        f"of {PROMPTS}; {len(margins)} part, {far} of them not at a tie (more than {TIE} nats)"
        if margins
        else f"of {PROMPTS}"
    )
    return Row(f"same tokens as vLLM: {name}", same, f">= {SAME_GOAL}", same >= SAME_GOAL, note)


def ours(folder: Path, variant: str = "", *flags: str) -> Engine:
    return Engine("Octavo", variant, serve_octavo(str(folder), "--served-model-name", "m", *LENGTH, *flags), model="m")


def vllm(folder: Path, dtype: str) -> Engine:
    binary, cores = vllm_binary(peers_folder()), len(os.sched_getaffinity(0))
    command = (
        str(binary),
        "serve",
        str(folder),
        "--served-model-name",
        "m",
        "--dtype",
        dtype,
        *LENGTH,
        "--skip-mm-profiling",
        "--disable-uvicorn-access-log",
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
    )
    env, more = vllm_environment(peers_folder(), cores), torchvision_folder(peers_folder())
    return Engine("vLLM", dtype, command, env | {"PYTHONPATH": str(more)}, "m", (binary, more))


def _alone(args: argparse.Namespace, root: Path) -> Iterator[Row]:
    folder = checkpoint("smolvlm", root)
    with ExitStack() as stack:
        vision = stack.enter_context(Server(ours(folder, "vision")))
        plain = stack.enter_context(Server(ours(folder, "text", "--language-model-only")))
        ask(vision, [question(picture())], 1)  # the processes for images start
        yield from again(vision, args.rounds)
        yield from gaps(vision, 4)
        yield text_beside(plain, vision, args.rounds)


def _beside_vllm(args: argparse.Namespace, root: Path) -> Iterator[Row]:
    small = [f"tiny-{family}" for family in args.families if {"rate", "tokens"} & set(args.parts)]
    for name in (["smolvlm"] if "rate" in args.parts else []) + small:
        folder, is_small = checkpoint(name, root), name in small
        dtype = "float32" if is_small else better_dtype()
        with ExitStack() as stack:
            try:
                pair = ours(folder, "", "--dtype", dtype), vllm(folder, dtype)
                own, other = (stack.enter_context(Server(engine)) for engine in pair)
            except ServerError as error:
                print(f"{name} is left out: {error}", flush=True)
                continue
            if is_small and "tokens" in args.parts:
                yield agreement(name, own, other)
            if "rate" in args.parts:
                for server in (own, other):
                    ask(server, [question(picture())], 1)
                for users in (1, 4):
                    yield from rate(name, own, other, args.rounds, users, users * (20 if is_small else 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--peers", action="store_true", help="also vLLM, where `make peers ARGS='vllm images'` has installed it"
    )
    parser.add_argument(
        "--parts",
        type=lambda text: text.split(","),
        default=["alone", "rate", "tokens"],
        help="some of alone,rate,tokens; the last two need --peers (default: all)",
    )
    parser.add_argument(
        "--families", type=lambda text: text.split(","), default=list(FAMILIES), help="small checkpoints"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement (default: %(default)s)")
    parser.add_argument("--output-json", type=Path, help="write the figures there")
    args = parser.parse_args()
    root, rows = peers_folder() / "images", list[Row]()
    if args.peers and (missing := vllm(root, "float32").missing()):
        raise SystemExit(f"vLLM: {missing}")
    parts = [_alone(args, root)] if "alone" in args.parts else []
    for row in itertools.chain(*parts, _beside_vllm(args, root) if args.peers else ()):
        rows.append(row)
        print(row, flush=True)
    if args.output_json:
        args.output_json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
