"""`make bench WHAT=parts`: every benchmark of this folder that runs on a CPU, one after the other; ARGS="NAME ..." """

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

# name -> what it shows
BENCHMARKS = {
    "scheduler": "cost of one step of the scheduler",
    "block_waste": "share of the KV cache's slots that hold a token",
    "startup": "from the start of the process to the first 200 of /health",
    "api_overhead": "what HTTP adds to the core alone",
    "dialects": "what a streamed token costs the API process in each dialect (goal: Ollama <= 1.05 x chat)",
    "event_loop": "how long work of one request holds up the others in the API process",
    "watched": "what it costs that the dashboard shows the KV cache's blocks (goal: >= 0.98 of the throughput)",
    "dashboard_start": "when the dashboard's page can be used (goal: <= 3 s)",
    "kernels_cpu": "CPU kernels against the machine's limits",
}


def main() -> int:
    names = sys.argv[1:] or list(BENCHMARKS)
    if unknown := [name for name in names if name not in BENCHMARKS]:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    failed = []
    for name in names:
        print(f"\n== {name}: {BENCHMARKS[name]}", flush=True)
        started = time.monotonic()
        command = ["octavo.cli.main", "bench", "startup"] if name == "startup" else [f"benchmarks.{name}"]
        if subprocess.run([sys.executable, "-m", *command], cwd=Path(__file__).parents[1]).returncode:
            failed.append(name)
        print(f"-- {time.monotonic() - started:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
