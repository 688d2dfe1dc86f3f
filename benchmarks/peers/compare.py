"""`make bench`: our server and whichever others are installed, one after the other on this machine, in one run.

    python -m benchmarks compare [--quick] [--engines octavo,vllm,llama.cpp,hf] [--readme]
    python -m benchmarks compare --files ...     (see files.py)
    python -m benchmarks compare --agreement ... (see agreement.py)
    python -m benchmarks compare --encoders ...  (see encoders.py)

SmolLM2-135M, 128 tokens in and 128 out, greedy, `ignore_eos`, a closed loop of 1 to 64 users; 20 users whose tokens are
drawn; prompts of 800 tokens, cold and with their first 768 in the prefix cache; how long a start takes; memory. Ours
runs first and again last, to see whether the machine has stayed the same. Figures go to
benchmarks/results/comparison.json (after each engine; other kinds of processor keep theirs), the plot beside it, the
ratios to the terminal. One engine failing costs the others nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers import agreement, encoders, files, report
from benchmarks.peers.cpus import better_dtype, cpu_flags, cpu_kind, load_results, save_results
from benchmarks.peers.engines import Engine, all_engines, llama_binary, peers_folder
from benchmarks.peers.load import make_prompts, run_level
from benchmarks.peers.server import Bystanders, Server, ServerError
from octavo.fetch.sources import resolve_model
from octavo.system.limits import cpu_count
from octavo.text.tokenizer import Tokenizer

INPUT, OUTPUT = 128, 128
LONG_PROMPT, SHARED = 800, 768
MEMORY_USERS = 20
DRAWN_USERS, DRAWN = 20, {"temperature": 0.7, "top_p": 0.9, "top_k": 0, "min_p": 0.0}
HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"


@dataclass(frozen=True)
class Plan:
    requests_per_user: dict[int, int]
    long_prompts: int  # of each kind
    restarts: int  # of servers that start within seconds

    def of(self, engine: Engine) -> dict[int, int]:
        """Requests a user, by users; memory is read after the first entry, on a server that has done nothing else."""
        levels = {users: self.requests_per_user[users] for users in (MEMORY_USERS, *self.requests_per_user)}
        return {users: n for users, n in levels.items() if users in (1, 20)} if engine.brief else levels


FULL = Plan({1: 4, 5: 3, 10: 3, 20: 2, 64: 2}, 7, 2)
QUICK = Plan({1: 2, 20: 1}, 3, 0)

BEGAN = time.perf_counter()


def say(text: str) -> None:
    minutes, seconds = divmod(time.perf_counter() - BEGAN, 60)
    print(f"{minutes:3.0f}:{seconds:02.0f}  {text}", flush=True)


class Prompts:
    """The same ones for every engine, never one twice to the same server."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_files(resolve_model(None, progress=False))
        self._seeds: Iterator[int] = iter(range(1_000_000))

    def restart(self) -> None:
        self._seeds = iter(range(1_000_000))

    def take(self, count: int, length: int = INPUT, prefix: int = 0) -> list[str]:
        return make_prompts(self._tokenizer, count, length, next(self._seeds), prefix)


def measure(engine: Engine, plan: Plan, prompts: Prompts) -> dict[str, Any]:
    """All figures of one engine. What fails is told under "error"; what was measured before stays."""
    record: dict[str, Any] = {"engine": engine.name, "label": engine.label, "flags": engine.shown(), "levels": []}
    prompts.restart()
    try:
        with Server(engine) as server:
            record["ready_s"] = [server.ready_s]
            say(f"  ready after {server.ready_s:.2f} s")
            for users, requests in plan.of(engine).items():
                record["levels"].append(_level(server, users, requests, prompts))
                if users == MEMORY_USERS:
                    record["pss_bytes"] = server.pss_bytes()
                    say(f"    memory of all its processes {record['pss_bytes'] / 1e9:.2f} GB")
            say(f"    drawn (temperature {DRAWN['temperature']}, top-p {DRAWN['top_p']}):")
            record["drawn"] = _level(server, DRAWN_USERS, plan.requests_per_user[DRAWN_USERS], prompts, DRAWN)
            if not engine.brief:
                record |= _long_prompts(server, plan, prompts)
        for _ in range(plan.restarts if record["ready_s"][0] < 10 else 0):
            with Server(engine) as server:
                record["ready_s"].append(server.ready_s)
    except (ServerError, TimeoutError, OSError, ValueError, psutil.Error) as error:
        record["error"] = f"{type(error).__name__}: {error}"
        say(f"  FAILED: {record['error']}")
    except Exception as error:  # a fault of ours: the others are measured all the same
        record["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    return record


def _level(
    server: Server, users: int, requests: int, prompts: Prompts, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    others = Bystanders(server)
    try:
        run_level(server.port, server.engine.model, prompts.take(users), users, 8, options=options)  # warms up
        others = Bystanders(server)
        texts = prompts.take(users * requests)
        level = run_level(server.port, server.engine.model, texts, users, OUTPUT, options=options)
    except TimeoutError:  # the other levels may still be possible
        say(f"    {users:3d} users: not done in time")
        return {"users": users, "errors": users * requests, "error": "not done in time"}
    busy = others.share()
    say(
        f"    {users:3d} users {level.tok_s:8.1f} tok/s   TTFT {level.ttft_p50:7.0f} / {level.ttft_p99:7.0f} ms   ITL "
        f"{level.itl_p50:6.1f} / {level.itl_p99:7.1f} ms"
        + (f"   {level.errors} ERRORS" if level.errors else "")
        + (f"   (others took {busy:.0%} of the CPUs)" if busy > 0.1 else "")
    )
    return asdict(level) | {"bystanders": busy}


def _long_prompts(server: Server, plan: Plan, prompts: Prompts) -> dict[str, Any]:
    """Time to the first token of 800 tokens, new ones, and ones that begin as an earlier prompt did."""

    def median_ttft(texts: list[str]) -> float:
        level = run_level(server.port, server.engine.model, texts, 1, 4)
        if level.errors:
            raise ServerError(level.error)
        return level.ttft_p50

    cold = median_ttft(prompts.take(plan.long_prompts, LONG_PROMPT))
    first, *others = prompts.take(plan.long_prompts + 1, LONG_PROMPT - SHARED, SHARED)
    median_ttft([first])
    warm = median_ttft(others)
    say(f"    prompts of {LONG_PROMPT} tokens: TTFT {cold:.0f} ms cold, {warm:.0f} ms with a warm prefix")
    return {"cold_ttft_ms": cold, "warm_ttft_ms": warm}


def first_start(engine: Engine) -> dict[str, Any]:
    """Ready with an empty cache: the model is fetched and unpacked on the way."""
    with tempfile.TemporaryDirectory() as empty:
        try:
            with Server(engine, {"OCTAVO_CACHE": empty}) as server:
                say(f"first start with an empty cache, fetching included: ready after {server.ready_s:.2f} s")
                return {"first_start_s": server.ready_s}
        except (ServerError, OSError) as error:
            say(f"first start: {error}")
            return {"first_start_error": str(error)}


def hugging_face(dtypes: list[str], batches: dict[int, int]) -> Iterator[dict[str, Any]]:
    """``batches``: batch size -> how many batches. One at a time in each dtype, larger ones in the last."""
    for dtype in dtypes:
        record: dict[str, Any] = {
            "engine": "Hugging Face",
            "label": f"Hugging Face generate {dtype}",
            "levels": [],
            "flags": f"transformers generate, {dtype}, static batches",
        }
        say(record["label"])
        for batch, requests in batches.items():
            if batch > 1 and dtype != dtypes[-1]:
                continue
            command = [sys.executable, "-m", "benchmarks.peers.hf_generate", dtype, str(batch), str(requests)]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=240, check=True, cwd=HERE.parents[1]
                )
                figures = json.loads(done.stdout.splitlines()[-1])
                record["version"] = figures.pop("version")
                record["levels"].append({"users": batch, "tok_s": figures["tok_s"]})
                record["ready_s"] = [figures["ready_s"]]
                say(f"    batches of {batch}: {figures['tok_s']:.1f} tok/s")
            except (subprocess.SubprocessError, ValueError, IndexError) as error:
                record["error"] = f"{error}: {(getattr(error, 'stderr', '') or '')[-300:]}"
                say(f"  FAILED: {record['error']}")
        yield record


def version_of(engine: Engine, root: Path) -> str:
    if engine.name == "Octavo":
        done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=HERE)
        return " ".join([metadata.version("octavo"), done.stdout.strip()]).strip()
    if engine.name == "vLLM":
        return next((d.name.split("-")[1] for d in root.glob("vllm/lib/python*/site-packages/vllm-*.dist-info")), "")
    done = subprocess.run([str(llama_binary(root)), "--version"], capture_output=True, text=True)
    return next((line for line in (done.stderr + done.stdout).splitlines() if "version" in line), "")


def main() -> int:  # noqa: C901 (the script, from top to bottom)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one and twenty users, few requests: about three minutes")
    parser.add_argument("--engines", help="names or labels to run, comma separated (default: all but what is doubled)")
    parser.add_argument("--budget-minutes", type=float, default=20, help="no engine is begun later (default: 20)")
    parser.add_argument("--output", type=Path, default=RESULTS / "comparison.json", help="(default: %(default)s)")
    parser.add_argument("--readme", action="store_true", help="write README.md and docs/measurements.md, too")
    parser.add_argument("--files", action="store_true", help="instead: every file of weights, see files.py --help")
    parser.add_argument("--agreement", action="store_true", help="instead: same answers? see agreement.py --help")
    parser.add_argument("--encoders", action="store_true", help="instead: sentences a second, see encoders.py --help")
    if "--encoders" in sys.argv[1:]:
        return encoders.main([word for word in sys.argv[1:] if word != "--encoders"])
    if "--files" in sys.argv[1:]:
        return files.main([word for word in sys.argv[1:] if word != "--files"])
    if "--agreement" in sys.argv[1:]:
        return agreement.main([word for word in sys.argv[1:] if word != "--agreement"])
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are in sessions of their own: end them first
    root, plan = peers_folder(), QUICK if args.quick else FULL
    wanted = [name.strip().lower() for name in args.engines.split(",")] if args.engines else None

    def chosen(name: str, label: str, default: bool = True) -> bool:
        if wanted is None:
            return default
        return label.lower() in wanted or (default and name.lower() in wanted)

    prompts = Prompts()
    results: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "flags": cpu_flags(),
        "workload": {"model": "SmolLM2-135M-Instruct", "input": INPUT, "output": OUTPUT, "quick": args.quick},
        "skipped": [],
        "runs": [],
    }
    kind, kinds = cpu_kind(), load_results(args.output)
    say(kind)
    if os.getloadavg()[0] > 0.5 * cpu_count():
        say(f"the machine is busy (load {os.getloadavg()[0]:.1f}): figures will be too low")

    def keep(record: dict[str, Any]) -> None:
        results["runs"].append(record)
        kinds["cpus"][kind] = results
        save_results(args.output, kinds)

    engines = [e for e in all_engines(root, cpu_count()) if chosen(e.name, e.label, e.default)]
    if args.quick and wanted is None:
        engines = [engine for engine in engines if not engine.brief]
    ours = [engine for engine in engines if engine.label == "Octavo"]
    for number, engine in enumerate([*engines, *(ours if len(engines) > 1 and not args.quick else [])]):
        again = number == len(engines)
        if again and chosen("hf", "Hugging Face"):
            _run_hugging_face(args.quick, keep)
        problem = engine.missing()
        if not problem and time.perf_counter() - BEGAN > 60 * args.budget_minutes:
            problem = f"no time left of {args.budget_minutes:.0f} minutes"
        if problem:
            say(f"{engine.label} skipped: {problem}")
            results["skipped"].append({"label": engine.label, "why": problem})
            continue
        say(engine.label + (" again" if again else ""))
        record = measure(engine, plan, prompts) | {"version": version_of(engine, root)}
        if engine in ours and not again:
            record |= first_start(engine)
        keep(record)
    if (not ours or args.quick or len(engines) == 1) and chosen("hf", "Hugging Face"):
        _run_hugging_face(args.quick, keep)
    say("done")
    print("\n" + report.text(kind, results))
    plot = args.output.with_suffix(".png")
    report.plot(kinds, plot)
    print(f"\nwrote {args.output.name} and {plot.name} into {args.output.parent.name}/")
    if args.readme:
        report.write_pages(kinds)
        print("wrote the tables into README.md and docs/measurements.md")
    return 1 if any("error" in record for record in results["runs"]) else 0


def _run_hugging_face(quick: bool, keep: Any) -> None:
    dtypes = ["float32"] if quick or better_dtype() == "float32" else ["float32", "bfloat16"]
    for record in hugging_face(dtypes, {1: 1} if quick else {1: 2, 20: 1}):
        keep(record)


if __name__ == "__main__":
    sys.exit(main())
