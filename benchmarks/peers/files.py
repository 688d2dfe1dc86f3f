"""`make bench ARGS=--files`: every file of weights beside what else could serve it, one cell (file, engine) at a time.

    python -m benchmarks peers/files [--quick] [--only q6_k,awq] [--engines octavo,vllm,llama.cpp] [--resume] [--report]

llama.cpp serves the same GGUF file (of a checkpoint, its values as a GGUF file), vLLM the same checkpoint. A cell is
written as soon as it is measured, into benchmarks/results/files.json under the kind of processor that it was measured
on; what does not run again keeps its figures, date and commit. ``--resume`` leaves out what was measured at this
commit. The tables and the plot of docs/measurements.md are written at the end, or by ``--report`` alone.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers import file_report
from benchmarks.peers.cpus import cpu_kind, load_results, save_results
from benchmarks.peers.engines import Engine, llama_binary, peers_folder, serve_octavo, vllm_binary, vllm_environment
from benchmarks.peers.load import Level, make_prompts, run_level
from benchmarks.peers.model_files import ModelFile, model_files
from benchmarks.peers.server import Bystanders, Server, ServerError
from octavo.fetch.sources import resolve_model
from octavo.system.limits import cpu_count
from octavo.text.tokenizer import Tokenizer

INPUT, OUTPUT, SLOW_OUTPUT = 128, 128, 48  # tokens; fewer of models of more than 10^9 numbers
LEVELS = {1: 2, 8: 2, 20: 1}  # requests a user, by users
QUICK_LEVELS = {1: 1, 8: 1}
PROMPT, LONG_OUTPUT = 512, 64
MODEL_LEN = 2048
SLOTS = 20
NAME = "bench"  # the served model's
ENGINES = ("Octavo", "llama.cpp", "vLLM")


def engine_of(name: str, file: ModelFile, root: Path, long: bool = False) -> Engine | None:
    """How ``name`` serves ``file``; None where it reads no such file. ``long``: for one user with a long context."""
    where = ("--host", "127.0.0.1", "--port", "{port}")
    if name == "Octavo":
        flags = ("--dtype", file.dtype) if file.dtype else ()
        return Engine(name, "", serve_octavo(str(file.path), *flags, "--served-model-name", NAME), model=NAME)
    if name == "llama.cpp":
        gguf = file if file.is_gguf else file.gguf
        if gguf is None:
            return None
        length = file.long + 2 * LONG_OUTPUT
        slots = ("-np", "1", "-c", str(length)) if long else ("-np", str(SLOTS), "-c", str(1024 * SLOTS))
        command = (
            str(llama_binary(root)),
            "-m",
            str(gguf.path),
            "--alias",
            NAME,
            *slots,
            "-t",
            str(cpu_count()),
            "--no-webui",
            *where,
        )
        return Engine(name, "", command, {}, NAME, (llama_binary(root),))
    if file.is_gguf:
        return None
    command = (
        str(vllm_binary(root)),
        "serve",
        str(file.path),
        "--served-model-name",
        NAME,
        "--dtype",
        file.dtype,
        "--max-model-len",
        str(file.long + 2 * LONG_OUTPUT if long else MODEL_LEN),
        "--disable-uvicorn-access-log",
        *where,
    )
    return Engine(name, "", command, vllm_environment(root, cpu_count()), NAME, (vllm_binary(root),))


def commit() -> str:
    """Of the tree, with a mark where files that matter differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(Path(__file__).parent), *words], capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", ":/server", ":/kernels")
    return git("rev-parse", "--short=7", "HEAD") + ("+" if changed else "")


class Prompts:
    """Texts of SmolLM2's tokens, never the same one twice to a server."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_files(resolve_model(None, progress=False))
        self._seed = 0

    def take(self, count: int, length: int) -> list[str]:
        self._seed += 1
        return make_prompts(self._tokenizer, count, length, self._seed)


def measure(engine: Engine, file: ModelFile, prompts: Prompts, quick: bool) -> dict[str, Any]:
    """One cell's figures. What fails is told under "error"; what was measured before stays."""
    cell: dict[str, Any] = {"flags": engine.shown(), "levels": {}}
    try:
        # A start reads the file from memory, as the second one of a file does.
        with Server(engine, timeout=600) as server:
            cell["ready_s"], cell["start_cpu_s"] = server.ready_s, server.cpu_seconds()
            run_level(server.port, NAME, prompts.take(1, 16), 1, 4)
            cell["pss_bytes"] = server.pss_bytes()
            cell |= _prompt(server, prompts, 1 if quick or file.slow else 3)
            output = SLOW_OUTPUT if file.slow else OUTPUT // 2 if quick else OUTPUT
            for users, requests in (QUICK_LEVELS if quick else LEVELS).items():
                cell["levels"][str(users)] = _level(server, prompts, users, 1 if file.slow else requests, output)
            cell["pss_bytes_after"] = server.pss_bytes()
    except (ServerError, TimeoutError, OSError, ValueError, psutil.Error) as error:
        cell["error"] = f"{type(error).__name__}: {error}"
    return cell


def _level(server: Server, prompts: Prompts, users: int, requests: int, output: int) -> dict[str, Any]:
    if users > 1:
        run_level(server.port, NAME, prompts.take(users, INPUT), users, 4)  # warms up
    others, before = Bystanders(server), server.cpu_seconds()
    level = _checked(run_level(server.port, NAME, prompts.take(users * requests, INPUT), users, output))
    cpu_ms = 1e3 * (server.cpu_seconds() - before) / (level.requests * output)
    return {
        "tok_s": level.tok_s,
        "ttft_ms": level.ttft_p50,
        "itl_ms": level.itl_p50,
        "cpu_ms_token": cpu_ms,
        "bystanders": others.share(),
    }


def _checked(level: Level) -> Level:
    if level.errors:
        raise ServerError(f"{level.errors} of {level.requests} requests failed: {level.error}")
    return level


def _prompt(server: Server, prompts: Prompts, count: int) -> dict[str, float]:
    """Time to the first token of prompts that are not cached, and the processors' time for each of their tokens."""
    before = server.cpu_seconds()
    level = _checked(run_level(server.port, NAME, prompts.take(count, PROMPT), 1, 1))
    return {
        "ttft_512_ms": level.ttft_p50,
        "prompt_cpu_ms_token": 1e3 * (server.cpu_seconds() - before) / count / PROMPT,
    }


def measure_long(engine: Engine, length: int, prompts: Prompts) -> dict[str, Any]:
    """A prompt of ``length`` tokens: its first token, and the ones after it."""
    try:
        with Server(engine, timeout=600) as server:
            run_level(server.port, NAME, prompts.take(1, 64), 1, 4)
            level = _checked(run_level(server.port, NAME, prompts.take(1, length), 1, LONG_OUTPUT, timeout=900))
            return {"long_ttft_ms": level.ttft_p50, "long_itl_ms": level.itl_p50, "long_pss_bytes": server.pss_bytes()}
    except (ServerError, TimeoutError, OSError, ValueError, psutil.Error) as error:
        return {"long_error": f"{type(error).__name__}: {error}"}


class Results:
    """``{"cpus": {kind: {"file/engine": cell}}}`` in a file, written whole after each cell."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all = load_results(path)
        self.cells: dict[str, Any] = self.all["cpus"].setdefault(cpu_kind(), {})

    def keep(self, file: ModelFile, engine: str, cell: dict[str, Any]) -> None:
        """In place of what was there for this kind of processor, or not: figures win over the lack of a program."""
        key = f"{file.name}/{engine}"
        if "missing" in cell and "missing" not in self.cells.get(key, cell):
            return
        self.cells[key] = {"title": file.title, "file": file.name, "engine": engine} | cell
        save_results(self.path, self.all)


def cells_to_run(files: list[ModelFile], engines: tuple[str, ...], root: Path) -> Iterator[tuple[ModelFile, Engine]]:
    """All engines of a file one after the other: ratios are taken within a file."""
    for file in files:
        for name in engines:
            engine = engine_of(name, file, root)
            if engine is not None:
                yield file, engine


def main(argv: list[str] | None = None, known: Callable[[Path], list[ModelFile]] = model_files) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1 and 8 users, few requests, no model of 10^9 numbers")
    parser.add_argument("--only", help="files to serve, comma separated: q6_k, smollm2-bf16, ... (default: all)")
    parser.add_argument("--engines", help=f"of {', '.join(ENGINES)}, comma separated (default: all)")
    parser.add_argument("--resume", action="store_true", help="leave out what was measured at this commit, in this way")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the tables")
    parser.add_argument("--output", type=Path, default=file_report.RESULTS, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are in sessions of their own: end them first
    root = peers_folder()
    files = known(root)
    wanted = [name.strip().lower() for name in args.only.split(",")] if args.only else None
    if unknown := set(wanted or ()) - {file.name for file in files}:
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}; there are {', '.join(f.name for f in files)}")
    chosen = [name.strip().lower() for name in args.engines.split(",")] if args.engines else None
    if unknown := set(chosen or ()) - {name.lower() for name in ENGINES}:
        parser.error(f"--engines: unknown {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}")
    engines = tuple(name for name in ENGINES if chosen is None or name.lower() in chosen)
    files = [
        f for f in files if (f.name in wanted if wanted else known is not model_files or not (args.quick and f.slow))
    ]
    results = Results(args.output)
    if not args.report:
        print(cpu_kind(), flush=True)
        _run(files, engines, root, results, args.quick, args.resume)
    print("\n" + file_report.text(results.all))
    file_report.plot(results.all, args.output.with_suffix(".png"))
    if args.output == file_report.RESULTS:
        file_report.write_pages(results.all)
    return 1 if any("error" in cell for cell in results.cells.values()) else 0


def _run(
    files: list[ModelFile], engines: tuple[str, ...], root: Path, results: Results, quick: bool, resume: bool
) -> None:
    prompts, now = Prompts(), commit()
    for file, engine in cells_to_run(files, engines, root):
        before = results.cells.get(f"{file.name}/{engine.name}", {})
        if resume and before.get("levels") and (before.get("commit"), before.get("quick")) == (now, quick):
            continue
        print(f"{time.strftime('%H:%M:%S')}  {file.name}: {engine.name}", flush=True)
        about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": now, "quick": quick}
        problem = engine.missing()
        try:
            file.ensure()
            if file.gguf and engine.name == "llama.cpp":
                file.gguf.ensure()
        except (OSError, RuntimeError, ImportError, subprocess.CalledProcessError) as error:
            problem = f"{file.name} could not be made: {error}"
        if problem:
            print(f"          {problem}", flush=True)
            results.keep(file, engine.name, about | {"missing": problem})
            continue
        cell = measure(engine, file, prompts, quick)
        long = engine_of(engine.name, file, root, long=True) if file.long and not quick else None
        if long is not None and "error" not in cell:
            cell |= measure_long(long, file.long, prompts)
        results.keep(file, engine.name, cell | about)
        print(f"          {file_report.one_line(cell)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
