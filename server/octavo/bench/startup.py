"""``octavo bench startup``: from the start of the process to the first 200 of /health."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from octavo.bench.report import percentile
from octavo.errors import OctavoError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-iters", type=int, default=5, help="starts to time (default: 5)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one start (default: 600)")
    parser.add_argument("--output-json", metavar="FILE", help="write the figures here")
    parser.add_argument("serve_args", nargs="*", help="after --: what to hand to `octavo serve`")


def run(args: argparse.Namespace) -> int:
    times = []
    for i in range(args.num_iters):
        seconds, log = time_start(args.serve_args, args.timeout)
        times.append(seconds)
        print(f"start {i + 1}: {seconds:.2f} s")
    print("\n".join(line for line in log.splitlines() if " took " in line or "loaded " in line))
    print(f"ready: median {percentile(times, 50):.2f} s, min {min(times):.2f} s, max {max(times):.2f} s")
    if args.output_json:
        Path(args.output_json).write_text(json.dumps({"ready_seconds": times}) + "\n")
    return 0


def time_start(serve_args: list[str], timeout: float = 600) -> tuple[float, str]:
    """Seconds until a fresh `octavo serve` answers /health with 200, and its log. The server is ended afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "octavo.cli.main",
        "serve",
        *serve_args,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
                    if response.status == 200:
                        seconds = time.perf_counter() - started
                        break
            except (urllib.error.URLError, OSError):
                pass
            if process.poll() is not None or time.perf_counter() - started > timeout:
                raise OctavoError(f"the server did not become ready: {process.communicate(timeout=5)[0][-2000:]}")
            time.sleep(0.01)
    finally:
        process.terminate()
    return seconds, process.communicate(timeout=60)[0]
