#!/usr/bin/env python3
"""`make test-long [ARGS="PART ..."]`: what `make test` samples or leaves out, in parts that do not stop each other.

Each part that has run is written to benchmarks/results/test-long.json, with its commit and date; the others' entries
stay as they are.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "test-long.json"
PYTEST = ["-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not gpu and not cluster"]
SCRATCH = "{scratch}"
# Arguments of python. Properties draw ten times as much as in `make test`, and tests marked `long` run.
PARTS = {
    "server": [*PYTEST, "tests/server"],
    "remote": [*PYTEST, "tests/server/engine"],
    "kernels": [*PYTEST, "tests/kernels"],
    "others": [*PYTEST, "tests", "--ignore=tests/server", "--ignore=tests/kernels"],
    "cluster": ["tests/cluster/suite.py"],
    "soak": ["-m", "benchmarks", "soak", "--minutes", "10"],
    "oracle": ["-m", "benchmarks", "quality", "--output", f"{SCRATCH}/quality.json"],
    "peers": ["-m", "benchmarks", "compare", "--quick", "--output", f"{SCRATCH}/comparison.json"],
}
ENVIRONMENT = {
    "HYPOTHESIS_PROFILE": "long",
    "OCTAVO_REAL_DURATIONS": "1",  # alerts wait as long as they say
    "OCTAVO_CHAOS": "100",
    "OCTAVO_ROLLOUTS": "20",
    "OCTAVO_ROUTER_ROUNDS": "20",
    "OCTAVO_ZERO_ROUNDS": "20",
    "OCTAVO_KILLS": "20",
    "OCTAVO_SCALE": "200",
}
OWN = {"remote": {"OCTAVO_TEST_EXECUTOR": "mp", "HYPOTHESIS_PROFILE": "ci"}}  # models in processes of their own
COUNTED = {"passed": "passed", "failed": "failed", "error": "failed", "errors": "failed", "skipped": "skipped"}


def counts_of(lines: list[str]) -> dict[str, int]:
    """Sums of pytest's last lines ("3 passed, 1 skipped in 5.1s"), of all sessions that a part has had."""
    counts = dict.fromkeys(COUNTED.values(), 0)
    for line in lines:
        if re.search(r"(passed|failed|skipped|errors?|deselected|warnings?) in [\d.]+s", line):
            for number, word in re.findall(r"(\d+) (\w+)", line.rsplit(" in ", 1)[0]):
                if word in COUNTED:
                    counts[COUNTED[word]] += int(number)
    return counts


def run(name: str, scratch: str) -> dict[str, object]:
    """Run one part and show what it says; what it came to."""
    print(f"\n[long] {name}", flush=True)
    tree = {
        "commit": _git("rev-parse", "HEAD"),
        "clean": not _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    command = [sys.executable, *(word.replace(SCRATCH, scratch) for word in PARTS[name])]
    start, lines = time.monotonic(), []
    env = {**os.environ, **_peers(), **ENVIRONMENT, **OWN.get(name, {})}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            lines.append(line)
    counts = counts_of(lines)
    if not any(counts.values()):  # a program, not pytest
        counts["failed" if process.returncode else "passed"] = 1
    return {
        **tree,
        "exit_status": process.returncode,
        **counts,
        "seconds": round(time.monotonic() - start),
    }


def _peers() -> dict[str, str]:
    """vLLM's own client, where `make peers` has put it."""
    folder = Path(os.environ.get("OCTAVO_PEERS") or Path.home() / ".cache" / "octavo" / "peers")
    vllm = shutil.which("vllm", path=folder / "vllm" / "bin")
    return {"OCTAVO_VLLM": vllm} if vllm and "OCTAVO_VLLM" not in os.environ else {}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main(names: list[str]) -> int:
    if unknown := [name for name in names if name not in PARTS]:
        print(f"[long] there is no part {unknown[0]!r}; the parts: {'; '.join(PARTS)}", file=sys.stderr)
        return 2
    ended: list[int] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in names or PARTS:
            result = run(name, scratch)
            ended.append(int(str(result["exit_status"])))
            results = (json.loads(RESULTS.read_text()) if RESULTS.exists() else {}) | {name: result}
            RESULTS.write_text(json.dumps({part: results[part] for part in PARTS if part in results}, indent=1) + "\n")
            print(f"[long] {name}: {result}", flush=True)
    return 1 if any(ended) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
