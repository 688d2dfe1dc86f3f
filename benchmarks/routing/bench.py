"""`make bench WHAT=routing`: how often conversations find their prefix behind each router, and how even the load is.

    python -m benchmarks routing [--quick] [--engines emulated|real] [--seeds 1 2 3 4 5] [--parts hits|cost|depth]
                                       [--workloads ...] [--routers ...]

Four replicas, each with a cache of 40 % of all that a run says. "of optimum" compares the rate of hits with one replica
whose cache is endless; round robin is measured in the same run. Emulated engines (fixed prefill, an LRU cache of text)
give a router's hits in seconds; the real ones are `octavo serve` on a tiny model, a token a character, with texts that
have as many tokens. Medians over seeds; into benchmarks/results/routing.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.emulated_engines import BLOCK_CHARACTERS, EmulatedEngines
from support.serving import Engine, free_port, tiny_model

from benchmarks.routing import depth, streams
from benchmarks.routing.routers import EVENTS_BLOCK, FRONTS, Front, Ports, direct, events_address, missing
from benchmarks.routing.workload import CACHE_SHARE, PACES, REPLICAS, WORKLOADS, Workload, run

RESULTS = Path(__file__).resolve().parents[1] / "results" / "routing.json"
PARTS = ("hits", "cost", "depth")
Figures = dict[str, float]


@contextlib.contextmanager
def emulated(workload: Workload, replicas: int, share: float) -> Iterator[tuple[Ports, int]]:
    """The replicas' ports, and the blocks of each one's cache. One replica computes as fast as four."""
    settings = PACES[workload.saturated]
    blocks = int(workload.characters * share / BLOCK_CHARACTERS)
    more = REPLICAS // replicas
    speed = {name: value * more for name, value in settings.items()}
    with EmulatedEngines([free_port() for _ in range(replicas)], blocks=blocks, **speed) as engines:
        yield [(port, port) for port in engines.ports], blocks


@contextlib.contextmanager
def real(workload: Workload, replicas: int, share: float) -> Iterator[tuple[Ports, int]]:
    """`octavo serve` on a tiny model of bytes with as many tokens in context as the workload needs."""
    blocks = int(workload.characters * share / EVENTS_BLOCK)
    length = 2 * (workload.system + workload.turn * (workload.turns + 1))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        ports = []
        for number in range(replicas):
            place = Path(folder) / str(number)
            place.mkdir()
            port = free_port()
            events = {"enable_kv_cache_events": True, "endpoint": events_address(port)}
            engine = Engine(
                place,
                "--num-gpu-blocks-override",
                str(blocks),
                "--block-size",
                str(EVENTS_BLOCK),
                "--kv-events-config",
                json.dumps(events),
                port=port,
            )
            template = "{% for m in messages %}{{ m.role }}\n{{ m.content }}\n{% endfor %}"
            (tiny_model(place / "model") / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
            config = place / "model" / "config.json"
            config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": length}))
            stack.enter_context(engine)
            ports.append((engine.port, engine.management_port))
        yield ports, blocks


def requests_of(ports: Ports) -> list[float]:
    """Requests that each replica has served."""
    counts = []
    for _, management in ports:
        page = urllib.request.urlopen(f"http://127.0.0.1:{management}/metrics", timeout=20).read().decode()
        lines = [line for line in page.splitlines() if line.startswith("vllm:request_success_total")]
        counts.append(sum(float(line.split()[-1]) for line in lines))
    return counts


def measure(kind: str, workload: Workload, front: Front, replicas: int, seed: int) -> Figures:
    """One run on fresh replicas."""
    engines = {"emulated": emulated, "real": real}[kind]
    # Beyond what a run says, an endless cache has room for blocks that are half full.
    share = CACHE_SHARE if replicas > 1 else 1.5
    with engines(workload, replicas, share) as (ports, blocks), front(ports) as port:
        before = requests_of(ports)
        began = time.monotonic()
        measured = asyncio.run(run(workload, port, seed))
        seconds = time.monotonic() - began
        assert measured.ttft, "no request was answered"
        served = [now - was for now, was in zip(requests_of(ports), before, strict=True)]
    return {
        "hit": 100 * measured.hit_rate,
        "balance": max(served) * len(served) / sum(served),
        "blocks": blocks,
        "ttft_p50_ms": 1000 * measured.percentile(0.5),
        "ttft_p99_ms": 1000 * measured.percentile(0.99),
        "failed": measured.failed,
        "seconds": seconds,
    }


def medians(runs: list[Figures]) -> Figures:
    return {name: statistics.median(one[name] for one in runs) for name in runs[0]}


def compare(kind: str, workload: Workload, names: list[str], seeds: list[int]) -> dict[str, Any]:
    """Figures by router. Routers alternate within a seed, so that a busy machine is busy for all."""
    fronts: dict[str, tuple[Front, int]] = {"one replica, endless cache": (direct, 1)}
    fronts |= {name: (FRONTS[name], REPLICAS) for name in names}
    runs: dict[str, list[Figures]] = {name: [] for name in fronts}
    for seed in seeds:
        for name, (front, replicas) in fronts.items():
            runs[name].append(measure(kind, workload, front, replicas, seed))
            print(f"{workload.name}, seed {seed}: {name} {runs[name][-1]['hit']:.1f} %", file=sys.stderr, flush=True)
    found = {name: medians(some) for name, some in runs.items()}
    optimum = found["one replica, endless cache"]["hit"]
    return {name: {**one, "of_optimum": 100 * one["hit"] / optimum} for name, one in found.items()}


def table(workload: str, found: dict[str, Figures]) -> str:
    cached = next(int(one["blocks"]) for name, one in found.items() if name != "one replica, endless cache")
    lines = [
        f"\n**{workload}** (each of {REPLICAS} caches: {cached} blocks)\n",
        "| router | hit % | of optimum % | requests max/mean | TTFT p50 / p99 ms | failed |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        lines.append(
            f"| {name} | {one['hit']:.1f} | {one['of_optimum']:.1f} | {one['balance']:.2f} "
            f"| {one['ttft_p50_ms']:.0f} / {one['ttft_p99_ms']:.0f} | {one['failed']:.0f} |"
        )
    return "\n".join(lines)


def _machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "load": round(os.getloadavg()[1], 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, two workloads, shorter streams (minutes)")
    parser.add_argument("--engines", choices=("emulated", "real"), default="real")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), metavar="NAME", help=", ".join(WORKLOADS))
    parser.add_argument("--routers", nargs="+", choices=list(FRONTS), metavar="NAME", help=", ".join(FRONTS))
    args = parser.parse_args()
    names = []
    for name in args.routers or FRONTS:
        reason = missing(name)
        if reason:
            print(f"{name} is left out: {reason}", file=sys.stderr)
        else:
            names.append(name)
    if args.quick:
        args.seeds, args.workloads = args.seeds[:1], args.workloads or ["sessions", "hot, saturated"]
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for part, module, rows in (("cost", streams, "routers"), ("depth", depth, "prompts")):
        if part in args.parts:
            found = module.compare(1 if args.quick else len(args.seeds), 0.25 if args.quick else 1)
            print(module.table(found), flush=True)
            results[part] = {**_machine(), rows: found}
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    chosen = (args.workloads or WORKLOADS) if "hits" in args.parts else ()
    for name in chosen:
        workload = WORKLOADS[name]
        if workload.tokens and args.engines == "emulated":
            print(f"{name} is left out: emulated engines know texts alone", file=sys.stderr)
            continue
        if args.engines == "real":  # a token is a character there
            workload = dataclasses.replace(workload, system=workload.system // 4, turn=workload.turn // 4)
        fronts = [one for one in names if workload.tokens or "KV events" not in one]  # that one needs token ids
        found = compare(args.engines, workload, fronts, args.seeds)
        print(table(f"{name}, {args.engines} engines, seeds {args.seeds}", found), flush=True)
        results.setdefault(args.engines, {})[name] = {
            "seeds": args.seeds,
            **_machine(),
            "routers": found,
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
