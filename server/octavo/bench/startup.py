"""``octavo bench startup``: from the start of the process to the first 200 of /health and the first token, by phase."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

from octavo.bench.report import percentile
from octavo.errors import OctavoError

PHASE = re.compile(r" (api|core) +\S+: (.*) took ([0-9.]+) s$")


def start_once(flags: list[str]) -> tuple[float, float, list[tuple[str, str, float]]]:
    """Seconds until /health is 200, seconds until a first token, and (process, phase, seconds) as logged."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.NamedTemporaryFile("r") as log:
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "octavo.cli.main", "serve", "--host", "127.0.0.1", "--port", "0", *flags],
            stdout=log.fileno(), stderr=log.fileno(), env=env,
        )  # fmt: skip
        try:
            url = _wait_for_url(process, log.name)
            while not _is_healthy(url):
                time.sleep(0.005)
            ready = time.perf_counter() - started
            body = json.dumps({"prompt": "The capital of France is", "max_tokens": 1}).encode()
            request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=300).read()
            answered = time.perf_counter() - started
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
        with open(log.name) as lines:
            phases = [(m[1], m[2], float(m[3])) for line in lines if (m := PHASE.search(line.rstrip()))]
    return ready, answered, phases


def _wait_for_url(process: subprocess.Popen[bytes], log: str) -> str:
    while True:
        with open(log) as lines:
            text = lines.read()
        if found := re.search(r"(?:listening|serving .*) (?:at|on) (http\S+)", text):
            return found[1]
        if process.poll() is not None:
            raise OctavoError(f"the server ended with exit code {process.returncode}:\n{text}")
        time.sleep(0.005)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `octavo bench startup`."""
    parser.add_argument(
        "--num-iters", type=int, default=3, help="Starts to measure, after one that is not (default: 3)"
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
