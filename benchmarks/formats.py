"""Which format of weights is fastest on this CPU: ours in turns with vLLM and llama.cpp, all servers running.

    python -m benchmarks formats [--rounds 3] [--only "octavo,vllm bfloat16"] [--page]

SmolLM2-135M, greedy. All servers run all the time and do nothing while another one is asked: a round asks each of them
for the same things, the first one changing from round to round, so that a machine that turns slower slows all. Figures
are medians of the rounds; those of the ratios are of ratios within a round. They go to results/formats.json, under the
kind of processor; ``--page`` writes the tables into docs/performance.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers.compare import Prompts
from benchmarks.peers.cpus import better_dtype, cpu_kind, load_results, save_results
from benchmarks.peers.engines import (
    LLAMA_SLOTS,
    Engine,
    all_engines,
    checkpoint_folder,
    peers_folder,
    serve_octavo,
)
from benchmarks.peers.files import engine_of
from benchmarks.peers.load import run_level
from benchmarks.peers.model_files import model_files
from benchmarks.peers.server import Bystanders, Server, ServerError
from benchmarks.sections import replace_section
from octavo.system.limits import cpu_count

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
INPUT, OUTPUT = 128, 128
LEVELS = {1: 2, 8: 1, 20: 1}  # requests a user, by users
LONG, MANY = 512, (8, 1024)
LLAMA_CONTEXT = 1280  # a slot: the prompts of 1,024 tokens, and what follows
COLUMNS = {"1": "1", "8": "8", "20": "20", "long": f"{LONG}", "many": f"{MANY[0]} x {MANY[1]:,}"}
# What is compared: (column, ours, the other, whether a smaller figure is better, the goal). PLAIN is the better of
# bfloat16 and float32 on the processor.
GOALS = [
    ("20", "Octavo PLAIN", "vLLM PLAIN", False, 1.5),
    ("long", "Octavo PLAIN", "vLLM PLAIN", True, 0.8),
    ("many", "Octavo PLAIN", "vLLM PLAIN", True, 0.8),
    ("1", "Octavo W8A8", "vLLM W8A8", False, 2.0),
    ("20", "Octavo W8A8", "vLLM W8A8", False, 1.5),
    ("many", "Octavo Q4_1", "vLLM PLAIN", True, 0.9),
    ("20", "Octavo Q4_1", "llama.cpp Q4_0", False, 3.0),
]


def engines(root: Path) -> list[Engine]:
    """Ours in every format that is the fastest at something, and the others at their best."""
    known = {engine.label: engine for engine in all_engines(root, cpu_count())}
    w8a8 = next(file for file in model_files(root) if file.name == "w8a8")
    w8a8.ensure()
    by_channel = serve_octavo(
        str(checkpoint_folder(root)), "--quantization", "int8_per_channel", "--served-model-name", "smollm2"
    )
    llama = known["llama.cpp Q4_0"]
    contexts = [str(LLAMA_CONTEXT * LLAMA_SLOTS) if before == "-c" else "" for before in ("", *llama.command)]
    ours, theirs = engine_of("Octavo", w8a8, root), engine_of("vLLM", w8a8, root)
    assert ours is not None and theirs is not None
    return [
        replace(known["Octavo"], variant="Q4_1"),
        replace(ours, variant="W8A8"),
        Engine("Octavo", "int8_per_channel", by_channel, model="smollm2"),
        known[f"Octavo {better_dtype()}"],
        replace(theirs, variant="W8A8"),
        known[f"vLLM {better_dtype()}"],
        replace(llama, command=tuple(new or old for new, old in zip(contexts, llama.command, strict=False))),
    ]


def ask(server: Server, prompts: Prompts) -> dict[str, float]:
    """Tokens a second by users, and milliseconds to the first token of prompts."""
    port, model, found = server.port, server.engine.model, dict[str, float]()
    for users, requests in LEVELS.items():
        level = run_level(port, model, prompts.take(users * requests), users, OUTPUT)
        if level.errors:
            raise ServerError(level.error)
        found[str(users)] = level.tok_s
    found["long"] = run_level(port, model, prompts.take(3, LONG), 1, 1).ttft_p50
    found["many"] = run_level(port, model, prompts.take(*MANY), MANY[0], 1).ttft_p50
    return found


def measure(wanted: list[Engine], rounds: int) -> dict[str, Any]:
    """Each engine's figures, round after round. One that does not start is left out with its reason."""
    figures: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "rounds": rounds, "engines": {}, "left_out": {}}
    with ExitStack() as stack:
        servers = []
        for engine in wanted:
            try:
                servers.append(stack.enter_context(Server(engine)))
            except ServerError as error:
                figures["left_out"][engine.label] = str(error)[-300:]
                print(f"{engine.label} is left out: {error}", flush=True)
                continue
            print(f"{engine.label}: ready after {servers[-1].ready_s:.1f} s", flush=True)
            figures["engines"][engine.label] = {
                "flags": engine.shown(), "ready_s": servers[-1].ready_s, "rounds": []
            }  # fmt: skip
        everybody, bystanders = Prompts(), Bystanders(*servers)
        for server in servers:
            run_level(server.port, server.engine.model, everybody.take(8), 8, 16)  # warms up
        for number in range(rounds):
            for server in servers[number % len(servers) :] + servers[: number % len(servers)]:
                found = ask(server, everybody)
                figures["engines"][server.engine.label]["rounds"].append(found)
                print(f"{server.engine.label:<26}" + "".join(f"{found[key]:>9.0f}" for key in COLUMNS), flush=True)
        figures["bystanders"] = bystanders.share()
    return figures


def ratios(figures: dict[str, Any]) -> list[tuple[str, float, float, float, float, bool]]:
    """Of each goal whose engines both ran: what is compared, the median ratio, the lowest, the highest, the goal, and
    whether it is met."""
    found = []
    plain = "float32" if "Octavo float32" in figures["engines"] else "bfloat16"
    for column, *labels, smaller, goal in GOALS:
        ours, other = (label.replace("PLAIN", plain) for label in labels)
        pair = [figures["engines"].get(label, {}).get("rounds") for label in (ours, other)]
        if not all(pair):
            continue
        each = [mine[column] / its[column] for mine, its in zip(*pair, strict=True)]
        middle = statistics.median(each)
        suffix = " (time)" if smaller else " user" if column == "1" else " users"
        what = f"{ours} over {other}, {COLUMNS[column]}{suffix}"
        found.append((what, middle, min(each), max(each), goal, middle <= goal if smaller else middle >= goal))
    return found


def tables(figures: dict[str, Any]) -> list[str]:
    lines = [
        "| tok/s at users: | 1 | 8 | 20 | first token of 512 | of 8 x 1,024 | ready |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for label, engine in figures["engines"].items():
        middle = {key: statistics.median(found[key] for found in engine["rounds"]) for key in COLUMNS}
        rates = " | ".join(f"{middle[key]:,.0f}" for key in ("1", "8", "20"))
        times = f"{middle['long']:.0f} ms | {middle['many'] / 1e3:.2f} s | {engine['ready_s']:.1f} s"
        lines.append(f"| {label} | {rates} | {times} |")
    lines += ["", "| ratio | median | lowest | highest |", "|---|---:|---:|---:|"]
    lines += [f"| {what} | {m:.2f} | {low:.2f} | {high:.2f} |" for what, m, low, high, _, _ in ratios(figures)]
    return lines


def page(cpus: dict[str, Any]) -> str:
    lines: list[str] = []
    for kind, figures in cpus.items():
        lines += [f"{kind}, {figures['date']}, medians of {figures['rounds']} rounds:", "", *tables(figures), ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="that ask every server (default: 3)")
    parser.add_argument("--only", help="labels of servers, comma separated (default: all)")
    parser.add_argument("--page", action="store_true", help="write the tables into docs/performance.md")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "formats.json", help="(default: %(default)s)")
    args = parser.parse_args()
    wanted, known = [], engines(peers_folder())
    chosen = [label.strip().lower() for label in args.only.split(",")] if args.only else None
    if unknown := set(chosen or ()) - {engine.label.lower() for engine in known}:
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}; there are {', '.join(e.label for e in known)}")
    for engine in known:
        if chosen is not None and engine.label.lower() not in chosen:
            continue
        if missing := engine.missing():
            print(f"{engine.label} is left out: {missing}", flush=True)
        else:
            wanted.append(engine)
    figures = measure(wanted, args.rounds)
    results = load_results(args.output)
    results["cpus"][cpu_kind()] = figures
    save_results(args.output, results)
    print("\n" + "\n".join(tables(figures)))
    for what, middle, low, high, goal, met in ratios(figures):
        print(f"{what}: {middle:.2f} ({low:.2f} - {high:.2f}), goal {goal:g} {'met' if met else 'MISSED'}")
    if args.page:
        replace_section(PAGE, "formats", page(results["cpus"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
