"""``octavo bench startup``: from the start of the process to the first 200 of /health and the first token, by phase."""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.request

from octavo.bench.local_server import local_server
from octavo.bench.report import percentile

PHASE = re.compile(r" (api|core) +\S+: (.*) took ([0-9.]+) s$")


def start_once(flags: list[str]) -> tuple[float, float, list[tuple[str, str, float]]]:
    """Seconds until /health is 200, seconds until a first token, and (process, phase, seconds) as logged."""
    with local_server(flags) as server:
        ready = time.perf_counter() - server.started
        body = json.dumps({"prompt": "The capital of France is", "max_tokens": 1}).encode()
        request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=300).read()
        answered = time.perf_counter() - server.started
        phases = [(m[1], m[2], float(m[3])) for line in server.log.splitlines() if (m := PHASE.search(line))]
    return ready, answered, phases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `octavo bench startup`."""
    parser.add_argument(
        "--num-iters", type=int, default=3, help="Number of measured starts, after one warm-up (default: 3)"
    )
    parser.add_argument("--output-json", metavar="FILE", help="Write the figures to this file (default: none)")
    parser.add_argument("serve_args", nargs="*", help="Flags of `octavo serve`, after --")


def run(args: argparse.Namespace) -> int:
    """The first start, not counted, leaves the model in the cache."""
    start_once(args.serve_args)
    runs = []
    for number in range(args.num_iters):
        runs.append(start_once(args.serve_args))
        print(f"start {number + 1}: ready after {runs[-1][0]:.2f} s, first token after {runs[-1][1]:.2f} s")
    ready, answered, phases = min(runs)
    print(f"median: ready after {percentile([r[0] for r in runs], 50):.2f} s")
    print(f"best: ready after {ready:.2f} s, first token after {answered:.2f} s")
    for process, phase, seconds in phases:
        print(f"  {process:<5} {phase:<28} {seconds:6.2f} s")
    if args.output_json:
        figures = {"ready_s": ready, "first_token_s": answered, "phases": phases, "runs": [r[:2] for r in runs]}
        with open(args.output_json, "w") as file:
            json.dump(figures, file)
    return 0
