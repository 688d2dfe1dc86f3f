"""`make bench WHAT=claims`: what the project claims for itself, measured on this machine, as a page with plots.

    python -m benchmarks claims [--quick] [--only waste,hugging_face,prefix,users] [--page docs/claims.md]

Four measurements of the embedded model (SmolLM2-135M-Instruct), about ten minutes on two cores; what cannot be measured
here, as on a GPU, is not on the page. Figures go to benchmarks/results/claims.json, plots and the page into docs/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import uvloop

from benchmarks import block_waste
from benchmarks.claims_page import plot_all, text_of
from benchmarks.peers.cpus import better_dtype, cpu_kind, save_results
from octavo.bench import serve, sweep
from octavo.bench.datasets import load_dataset
from octavo.bench.load import find_model, load_tokenizer, measure
from octavo.bench.local_server import local_server
from octavo.bench.report import Report
from octavo.engine.args import EngineArgs
from octavo.plan.measure import measure as measure_memory
from octavo.worker.device import choose_device

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "claims.json"
PAGE = HERE.parent / "docs" / "claims.md"
BATCH = 20  # of Hugging Face's static batches
SHARED, OWN = 768, 32  # tokens of a prompt: those that all share, and the others
LONGEST = 2048  # tokens that a request may have
RESERVED = 8  # requests of LONGEST tokens that the cache of `users` holds
SCRAPE_SECONDS = 0.2


def waste(quick: bool) -> dict[str, Any]:
    """Of the real scheduler and KV cache manager; no model runs, so it takes the same everywhere."""
    requests, shortest, longest = (60 if quick else 200), 100, 1000
    found: dict[str, Any] = {"requests": requests, "shortest": shortest, "longest": longest, "block_sizes": {}}
    for size in (8, 16, 32, 64):
        steps = block_waste.run(requests, size, shortest, longest)
        shares = [1 - step.used for step in steps]
        reserved = [1 - step.tokens / (step.requests * longest) for step in steps if step.requests]
        found["block_sizes"][str(size)] = {"mean": statistics.mean(shares), "worst_step": max(shares)}
        found["reserved"] = {"mean": statistics.mean(reserved)}  # the same for every size of blocks
    return found


def hugging_face(quick: bool) -> dict[str, Any]:
    """Octavo as it comes, and in the type of the baseline, beside transformers in the type that it is fastest in."""
    dtype = better_dtype()
    runs = []
    for flags in ([], ["--dtype", dtype, "--quantization", "none"]):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            words = ["bench", "throughput", *flags, "--num-prompts", "20" if quick else "60", "--input-len", "128"]
            words += ["--output-len", "32" if quick else "128", "--baseline", "hf", "--hf-dtype", dtype]
            words += ["--hf-max-batch-size", str(BATCH), "--disable-tqdm"]
            command = [sys.executable, "-m", "octavo.cli.main", *words, "--output-json", file.name]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"octavo {' '.join(words)} failed: {done.stderr[-2000:]}")
            runs.append({"command": " ".join(["octavo", *words])} | json.loads(Path(file.name).read_text()))
    return {"runs": runs}


def prefix(quick: bool) -> dict[str, Any]:
    """Prompts that begin alike, with and without the prefix cache, there and back again."""
    words = ["--param", "enable_prefix_caching=on,off", "--users", "1,10", "--repeats", "1" if quick else "2"]
    words += ["--requests-per-user", "2" if quick else "5", "--random-prefix-len", str(SHARED)]
    words += ["--random-input-len", str(OWN), "--random-output-len", "32", "--disable-tqdm"]
    parser = argparse.ArgumentParser()
    sweep.add_arguments(parser)
    rows = sweep.measure_all(sweep.Sweep.of(parser.parse_args(words)))
    if wrong := next((row.error for row in rows if row.error), ""):
        raise SystemExit(f"prefix: {wrong}")
    shown = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "prefix_hit_rate")
    return {
        "command": " ".join(["octavo bench sweep", *words]),
        "shared": SHARED,
        "own": OWN,
        "rows": [
            {"caching": row.configuration["enable_prefix_caching"], "users": row.users}
            | {name: statistics.median(row.values(name)) for name in shown}
            for row in rows
        ],
    }


def users(quick: bool) -> dict[str, Any]:
    """How many requests run at the same time in one KV cache: with blocks as they grow, and where each must have room
    for the longest from the start (so many --max-num-seqs). There and back again."""
    blocks = RESERVED * LONGEST // 16
    config = EngineArgs().create_engine_config()
    memory = measure_memory(replace(config, device=choose_device(config.device).type), 1)
    ways = {"paged": [], "reserved": ["--max-num-seqs", str(RESERVED)]}
    found: dict[str, Any] = {
        "longest": LONGEST,
        "reserved": RESERVED,
        "tokens": blocks * 16,
        "cache_bytes": blocks * 16 * sum(spec.bytes_per_token() for spec in memory.specs),
        "runs": {name: [] for name in ways},
    }
    words = ["--num-prompts", "96" if quick else "256", "--input-len", "100", "--output-len", "100"]
    words += ["--random-range-ratio", "0.5", "--ignore-eos", "--temperature", "0", "--disable-tqdm"]
    found["load"] = " ".join(["octavo bench serve", *words])
    for name in ("paged", "reserved") if quick else ("paged", "reserved", "reserved", "paged"):
        flags = ["--num-gpu-blocks-override", str(blocks), "--max-model-len", str(LONGEST), *ways[name]]
        flags += ["--max-num-queued-reqs", "256"]  # all wait in its queue, none is refused
        found["runs"][name].append(_load_and_watch(flags, words) | {"command": " ".join(["octavo serve", *flags])})
    return found


def _load_and_watch(flags: list[str], words: list[str]) -> dict[str, Any]:
    with local_server(flags) as server:
        parser = argparse.ArgumentParser()
        serve.add_arguments(parser)
        args = parser.parse_args([*words, "--base-url", server.url])
        model, _ = find_model(args)
        samples = load_dataset(args, load_tokenizer(None))
        running: list[tuple[float, float]] = []
        before, stop, began = _metric(server.url, "vllm:num_preemptions_total"), threading.Event(), time.perf_counter()

        def watch() -> None:
            while not stop.wait(SCRAPE_SECONDS):
                count = _metric(server.url, "vllm:num_requests_running")
                if not running or running[-1][1] != count:
                    running.append((time.perf_counter() - began, count))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            results, seconds = uvloop.run(measure(args, samples, model, []))
        finally:
            stop.set()
            watcher.join()
        figures = Report(results, seconds, {}).to_dict()
        if figures["failed"]:
            raise RuntimeError(f"{figures['failed']} requests failed: what is left is another load")
        lengths = [result.prompt_len + result.output_tokens for result in results]
        return {
            "running": [[round(at, 2), count] for at, count in running],
            "peak": max(count for _, count in running),
            "preemptions": _metric(server.url, "vllm:num_preemptions_total") - before,
            "mean_length": statistics.mean(lengths),
            **{name: figures[name] for name in ("completed", "failed", "output_throughput", "median_ttft_ms")},
        }


def _metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=10).text
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE))


MEASUREMENTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "waste": waste,
    "hugging_face": hugging_face,
    "prefix": prefix,
    "users": users,
}


def about(command: str) -> dict[str, Any]:
    """What a reader must know to judge the figures."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=HERE)
    versions = {name: metadata.version(name) for name in ("octavo", "torch", "transformers")}
    return {
        "machine": cpu_kind(),
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "versions": versions | {"Python": platform.python_version()},
        "commit": commit.stdout.strip(),
        "load_before": round(os.getloadavg()[0], 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few requests: two minutes, and not for the record")
    parser.add_argument("--only", default=",".join(MEASUREMENTS), help="the others are not on the page then")
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON of all figures (default: %(default)s)")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page; plots lie beside it (default: %(default)s)")
    parser.add_argument("--draw", action="store_true", help="measure nothing: the page again from --output")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with this process
    if unknown := set(names := args.only.split(",")) - set(MEASUREMENTS):
        parser.error(f"--only takes {', '.join(MEASUREMENTS)}, got {', '.join(sorted(unknown))}")
    results: dict[str, Any] = json.loads(args.output.read_text()) if args.draw else {}
    if not args.draw:
        if os.getloadavg()[0] > 0.5:
            print(f"the machine is busy (load {os.getloadavg()[0]:.1f}): figures will be too low")
        results["about"] = about("make bench WHAT=claims" + " ARGS=--quick" * args.quick)
        print(results["about"]["machine"])
        for name in names:
            started = time.perf_counter()
            results[name] = MEASUREMENTS[name](args.quick)
            print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
            save_results(args.output, results)
    plot_all(results, args.page.parent)
    args.page.write_text(text_of(results))
    print(f"wrote {args.output.name} and {args.page.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
