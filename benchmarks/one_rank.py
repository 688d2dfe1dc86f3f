#!/usr/bin/env python3
"""What the ranks cost an engine that has one: CPU time of a step, now and before there were ranks.

    python -m benchmarks one_rank [--base REVISION] [--runs 20] [--users 20]      (3 minutes)

The base is the parent of the commit that added what ranks exchange by, kernels/octavo_kernels/cpu/collectives.py. Both
trees have a process with the embedded model, and take turns: a run is the same greedy batch, and its CPU time that of
all threads. Prints the medians and the median of the ratios; whether the recorded steps hold the same operations in the
same order; exit status 1 where they do not, or the ratio is above 1.03.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MOST = 1.03
_CHILD = """
import sys, time
from octavo import LLM, SamplingParams
import json
users = int(sys.argv[1])
llm = LLM(max_model_len=512, max_num_seqs=users)
params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
prompts = [{"prompt_token_ids": [5 + user, *range(100, 116)]} for user in range(users)]
def run():
    llm.reset_prefix_cache()
    steps, started = llm.engine.num_steps, time.process_time()
    llm.generate(prompts, params, use_tqdm=False)
    return (time.process_time() - started) / (llm.engine.num_steps - steps) * 1e3
run()
from octavo_kernels.cpu.library import NAMES
words = llm.engine.executor.worker.runner.device_runner.recorded_steps._step._words
names, at = [], 0
while at < len(words):
    names.append(NAMES[int(words[at])])
    at += 2 + int(words[at + 1])
print(json.dumps(names), flush=True)
for line in sys.stdin:
    print(json.dumps(run()), flush=True)
"""


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout.strip()


def first_without_ranks() -> str:
    added = git("log", "--diff-filter=A", "--format=%H", "--", "kernels/octavo_kernels/cpu/collectives.py").split()
    return f"{added[-1]}^"


def start(tree: Path, users: int) -> subprocess.Popen[str]:
    paths = [str(tree / name) for name in ("server", "kernels")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, str(tree / "kernels/octavo_kernels/cpu/compiler.py")], env=env, check=True)
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(users)],
        env=env,
        cwd=tree,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def read(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def ask(process: subprocess.Popen[str]) -> float:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(read(process))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="revision to compare with")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--users", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        git("worktree", "add", "--detach", str(base), args.base or first_without_ranks())
        processes: list[subprocess.Popen[str]] = []
        try:
            processes += [start(base, args.users), start(ROOT, args.users)]
            before, now = (read(process) for process in processes)
            times: list[list[float]] = [[], []]
            for run in range(args.runs):
                for which in (0, 1) if run % 2 else (1, 0):
                    times[which].append(ask(processes[which]))
        finally:
            for process in processes:
                process.kill()
                process.wait()
            git("worktree", "remove", "--force", str(base))
    ratio = statistics.median(ours / theirs for theirs, ours in zip(*times, strict=True))
    for name, values in zip(("before", "now"), times, strict=True):
        print(f"{name:>6}: {statistics.median(values):.3f} ms of CPU time a step, {args.users} users")
    print(f" ratio: {ratio:.3f} (median of {args.runs} pairs; at most {MOST})")
    print(f" steps: {len(now)} operations, {'as before' if now == before else 'NOT as before'}")
    return int(ratio > MOST or now != before)


if __name__ == "__main__":
    sys.exit(main())
