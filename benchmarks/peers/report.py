"""What a comparison says: ratios against the goals, a table for people, one plot.

python -m benchmarks peers/report [FILE.json] [--readme]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.cpus import load_results
from benchmarks.sections import replace_section

RESULTS = Path(__file__).parents[1] / "results"
README = Path(__file__).parents[2] / "README.md"
DOCS = README.parent / "docs"
OURS = "Octavo"
DRAWN = "20, drawn"  # temperature 0.7, top-p 0.9


@dataclass
class Engine:
    """All runs of one engine with the same flags; figures are means over them, starts the median."""

    label: str
    name: str
    runs: list[dict[str, Any]]

    def level(self, users: int, key: str = "tok_s") -> float | None:
        levels = [lv for run in self.runs for lv in run["levels"] if lv["users"] == users and not lv.get("errors")]
        values = [level[key] for level in levels if key in level]
        return statistics.mean(values) if values else None

    def figure(self, key: str) -> float | None:
        values = [run[key] for run in self.runs if key in run]
        return statistics.mean(values) if values else None

    @property
    def drawn(self) -> float | None:
        """Tokens a second of 20 users whose tokens are drawn."""
        levels = [
            run["drawn"] for run in self.runs if "tok_s" in run.get("drawn", {}) and not run["drawn"].get("errors")
        ]
        return statistics.mean(level["tok_s"] for level in levels) if levels else None

    @property
    def ready(self) -> float | None:
        starts = [start for run in self.runs for start in run.get("ready_s", [])]
        return statistics.median(starts) if starts else None

    @property
    def users(self) -> list[int]:
        return sorted({level["users"] for run in self.runs for level in run["levels"] if not level.get("errors")})


def engines_of(results: dict[str, Any]) -> list[Engine]:
    found: dict[str, Engine] = {}
    for run in results["runs"]:
        found.setdefault(run["label"], Engine(run["label"], run["engine"], [])).runs.append(run)
    return list(found.values())


@dataclass(frozen=True)
class Goal:
    what: str
    value: float
    bound: float
    at_least: bool
    unit: str = ""

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        unit = self.unit or "x"
        judged = "met " if self.met else "MISS"
        return f"{judged} {self.value:8.2f}{unit:<3} ({sign} {self.bound:.3g}{unit})  {self.what}"


PRECISION = (
    "Octavo computes with the file's own weights (Q4_1: 4 bits), int8 activations and an int8 KV cache; the others, "
    "and Octavo where a precision is named, as their names say."
)


def goals(results: dict[str, Any]) -> Iterator[Goal]:  # noqa: C901 (a line or two for each goal)
    """Those that the figures at hand can judge."""
    engines = engines_of(results)
    ours = next((engine for engine in engines if engine.label == OURS), None)
    if ours is None:
        return

    def best(choose: Callable[[Engine], float | None], name: str | None, most: bool) -> tuple[float, str] | None:
        others = [(choose(e), e.label) for e in engines if e.name == name or (name is None and e.name != OURS)]
        known = [(value, label) for value, label in others if value]
        return (max if most else min)(known) if known else None

    def over(
        what: str, choose: Callable[[Engine], float | None], name: str | None, bound: float, most: bool
    ) -> Iterator[Goal]:
        mine, other = choose(ours), best(choose, name, most)
        if mine and other:
            yield Goal(f"{what} / {other[1]}", mine / other[0], bound, at_least=most)

    def users(count: int) -> Callable[[Engine], float | None]:
        return lambda engine: engine.level(count)

    # Int8 products are twice as fast where there is AVX-VNNI beside AVX-512 (a Zen 5's datapaths, not a Zen 4's).
    yield from over("20 users, tok/s", users(20), "vLLM", 3.2 if "avx_vnni" in results["flags"] else 2.5, True)
    yield from over("20 users, tok/s", users(20), "llama.cpp", 2.0, True)
    for size, way, bound in ((1, "one at a time", 24), (20, "static batches of 20", 1)):
        if (theirs := best(users(size), "Hugging Face", True)) and (mine := ours.level(20)):
            yield Goal(f"20 users, tok/s / {theirs[1]}, {way}", mine / theirs[0], bound, True)
    yield from over("1 user, tok/s", users(1), "llama.cpp", 1.1, True)
    yield from over("1 user, tok/s", users(1), "vLLM", 3, True)
    yield from _same_precision(engines)
    for count in (5, 10):
        yield from over(f"{count} users, tok/s", users(count), None, 1, True)
    yield from over("warm prefix of 800, TTFT", lambda e: e.figure("warm_ttft_ms"), "vLLM", 0.5, False)
    yield from over("cold prompt of 800, TTFT", lambda e: e.figure("cold_ttft_ms"), None, 1, False)
    if ours.ready:
        yield Goal("ready, warm cache", ours.ready, 2, False, " s")
    if first := ours.figure("first_start_s"):
        yield Goal("ready, very first start (fetches the model)", first, 8, False, " s")
    if pss := ours.figure("pss_bytes"):
        yield Goal("memory (PSS) after 20 users", pss / 1e9, 1.0, False, " GB")
    many, some = ours.level(64), ours.level(20)
    if many and some:
        yield Goal("64 users, tok/s / 20 users", many / some, 1, True)
    p99, p50 = ours.level(64, "itl_p99"), ours.level(64, "itl_p50")
    if p99 and p50:
        yield Goal("64 users, ITL p99 / p50", p99 / p50, 3, False)


def _same_precision(engines: list[Engine]) -> Iterator[Goal]:
    """Ours beside vLLM, where both serve the checkpoint in the dtype that their labels name."""
    by_label = {engine.label: engine for engine in engines}
    for label, theirs in by_label.items():
        ours = by_label.get(label.replace("vLLM", OURS))
        if theirs.name == "vLLM" and ours is not None:
            for count in ours.users:
                if rate := theirs.level(count):
                    what = f"same precision, {count} user{'s' * (count > 1)}, tok/s / {label}"
                    yield Goal(what, (ours.level(count) or 0.0) / rate, 1.2, True)


def _number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _rate(value: float | None) -> str:
    return _number(value, 1 if (value or 0) < 100 else 0)


def _rows(engines: list[Engine]) -> tuple[list[str], list[list[str]]]:
    counts = sorted({users for engine in engines for users in engine.users})
    has_drawn = any(e.drawn for e in engines)
    head = [
        "tok/s at users:",
        *map(str, counts),
        *([DRAWN] if has_drawn else []),
        "TTFT 20 users",
        "800 cold",
        "800 warm",
        "ready",
        "memory",
    ]
    rows = []
    for e in engines:
        memory, ready = e.figure("pss_bytes"), e.ready
        served = e.name != "Hugging Face"
        ttft, cold, warm = e.level(20, "ttft_p50"), e.figure("cold_ttft_ms"), e.figure("warm_ttft_ms")
        rows.append(
            [e.label, *(_rate(e.level(users)) for users in counts), *([_rate(e.drawn)] if has_drawn else [])]
            + ["–" if ms is None else f"{ms:,.0f} ms" for ms in (ttft, cold, warm)]
            + [f"{ready:.1f} s" if ready and served else "–", f"{memory / 1e9:.2f} GB" if memory else "–"]
        )
    return head, rows


def _drift(engines: list[Engine]) -> str:
    ours = next((engine for engine in engines if engine.label == OURS and len(engine.runs) > 1), None)
    if ours is None:
        return ""
    runs = [{lv["users"]: lv["tok_s"] for lv in run["levels"] if "tok_s" in lv} for run in ours.runs]
    changes = [runs[-1][users] / runs[0][users] - 1 for users in runs[0] if users in runs[-1] and runs[0][users]]
    if not changes:
        return ""
    return f"Octavo at the end against Octavo at the beginning: {statistics.mean(changes):+.1%} tok/s"


def text(kind: str, results: dict[str, Any]) -> str:
    """For the terminal: one kind of processor."""
    engines = engines_of(results)
    head, rows = _rows(engines)
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [kind, ""]
    for row in [head, *rows]:
        lines.append(
            "  ".join(
                cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
        )
    lines += ["", *(str(goal) for goal in goals(results))]
    busiest = max((lv.get("bystanders", 0) for run in results["runs"] for lv in run["levels"]), default=0)
    lines += ["", f"Other processes took at most {busiest:.0%} of the CPUs during a level.", _drift(engines)]
    lines += [f"{entry['label']} skipped: {entry['why']}" for entry in results["skipped"]]
    lines += [f"{run['label']} FAILED: {run['error']}" for run in results["runs"] if "error" in run]
    return "\n".join(line for line in lines if line is not None).rstrip()


def markdown(kinds: dict[str, Any]) -> str:
    """The section of docs/measurements.md: table, ratios and flags of each kind of processor."""
    workload = latest(kinds)[1]["workload"]
    lines = [
        f"{workload['model']}, {workload['input']} tokens in and {workload['output']} out, a closed loop of users, "
        "output tokens a second, greedy or, where it says so, drawn (temperature 0.7, top-p 0.9); TTFT is the median. "
        f"{PRECISION} One run of `make bench` on each kind of processor; "
        "ratios are taken within a run.",
        "",
        "![throughput and time to first token over users](comparison.png)",
    ]
    for kind, results in kinds["cpus"].items():
        lines += ["", f"### {kind}", "", *_section(results)]
    return "\n".join(lines)


def _section(results: dict[str, Any]) -> list[str]:
    head, rows = _rows(engines_of(results))
    lines = [
        results["date"][:10] + (" (`--quick`)." if results["workload"]["quick"] else "."),
        "",
        "| " + " | ".join(head) + " |",
        "|---" + "|---:" * (len(head) - 1) + "|",
    ]
    for row in rows:
        cells = [f"**{cell}**" if row[0] == OURS else cell for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| ratio in that run | | goal |", "|---|---:|---:|"]
    for goal in goals(results):
        unit, sign = goal.unit or "x", "≥" if goal.at_least else "≤"
        lines.append(
            f"| {goal.what} | {goal.value:.2f}{unit} | {sign} {goal.bound:g}{unit}{'' if goal.met else ', missed'} |"
        )
    lines += ["", "How each was started:", "", "```"]
    shown = {run["label"]: f"{run['flags']}" for run in results["runs"]}
    lines += [f"{flags}   # {label} {_version(results, label)}".rstrip() for label, flags in shown.items()]
    return [*lines, "```"]


def latest(kinds: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The kind of processor that was measured last, and its figures."""
    return max(kinds["cpus"].items(), key=lambda entry: str(entry[1]["date"]))


def _version(results: dict[str, Any], label: str) -> str:
    return next((run["version"] for run in results["runs"] if run["label"] == label and run.get("version")), "")


def summary(kinds: dict[str, Any]) -> str:
    """The README's section: each engine at its best and ours in both precisions, few columns."""
    lines = []
    for kind, results in kinds["cpus"].items():
        engines = engines_of(results)
        best = {}
        for engine in sorted(engines, key=lambda engine: engine.level(20) or 0):
            best[engine.label if engine.name == OURS else engine.name] = engine
        head, rows = _rows([engine for engine in engines if engine in best.values()])
        wanted = (head[0], "1", "20", DRAWN, "64", "TTFT 20 users", "800 warm", "ready", "memory")
        shown = [head.index(name) for name in wanted if name in head]
        lines += [
            f"{kind}, {results['date'][:10]}:",
            "",
            "| " + " | ".join(head[column] for column in shown) + " |",
            "|---" + "|---:" * (len(shown) - 1) + "|",
            *("| " + " | ".join(row[column] for column in shown) + " |" for row in rows),
            "",
        ]
    return "\n".join(lines).rstrip()


def write_pages(kinds: dict[str, Any]) -> None:
    """Write the tables of README.md, docs/performance.md and docs/measurements.md, and the plot."""
    replace_section(README, "comparison", summary(kinds))
    replace_section(DOCS / "performance.md", "summary", summary({"cpus": dict([latest(kinds)])}))
    replace_section(DOCS / "measurements.md", "comparison", markdown(kinds))
    plot(kinds, DOCS / "comparison.png")


COLOURS = {"Octavo": "#d1495b", "vLLM": "#2e6f95", "llama.cpp": "#3a7d44", "Hugging Face": "#7a7a7a"}
STYLES = [("-", "o"), ("--", "s"), (":", "^"), ("-.", "D")]


def plot(kinds: dict[str, Any], path: Path) -> None:
    """Throughput and the median time to the first token (p99 as a thin line) over users, one colour an engine, of the
    kind of processor that was measured last."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullLocator

    kind, results = latest(kinds)
    engines = engines_of(results)
    counts = sorted({users for engine in engines for users in engine.users})
    if not counts:
        return
    place = {users: i for i, users in enumerate(counts)}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12.5, 6.2))
    seen: dict[str, int] = {}
    for engine in engines:
        users = engine.users
        if not users:
            continue
        line, marker = STYLES[seen.setdefault(engine.name, 0) % len(STYLES)]
        seen[engine.name] += 1
        ours = engine.label == OURS
        look = {
            "color": COLOURS.get(engine.name, "black"),
            "marker": marker,
            "markersize": 7 if ours else 5,
            "linestyle": line if users == counts else "none",  # no line through what was not measured
            "linewidth": 3 if ours else 1.6,
            "zorder": 5 if ours else 3,
        }
        rates = [engine.level(count) or 0 for count in users]
        left.plot([place[count] for count in users], rates, label=engine.label, **look)
        if ours:
            for count, rate in zip(users, rates, strict=True):
                left.annotate(
                    f"{rate:,.0f}",
                    (place[count], rate),
                    xytext=(0, 9),
                    textcoords="offset points",
                    ha="center",
                    color=COLOURS[OURS],
                    fontweight="bold",
                    fontsize=10,
                )
        waits = [(place[count], engine.level(count, "ttft_p50"), engine.level(count, "ttft_p99")) for count in users]
        known = [(x, p50, p99) for x, p50, p99 in waits if p50 and p99]
        if not known:
            continue
        xs, p50s, p99s = zip(*known, strict=True)
        right.plot(xs, p50s, **look)
        if users == counts:
            right.fill_between(xs, p50s, p99s, color=look["color"], alpha=0.10 if ours else 0.05, linewidth=0)
    left.set_title("Output tokens a second (higher is better)", fontsize=11)
    right.set_title("Time to first token, ms: p50, shaded up to p99 (lower is better)", fontsize=11)
    left.set_ylim(0, left.get_ylim()[1] * 1.08)
    right.set_yscale("log")
    right.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:,.0f}"))
    for axes in (left, right):
        axes.set_xticks(range(len(counts)), list(map(str, counts)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("users at once")
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlim(-0.3, len(counts) - 0.7)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    workload = results["workload"]
    figure.suptitle(
        f"{workload['model']} on a CPU: {workload['input']} tokens in, {workload['output']} out",
        fontsize=14,
        fontweight="bold",
        x=0.01,
        ha="left",
    )
    figure.text(0.012, 0.925, kind, fontsize=9, color="#555555")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=min(4, len(labels)), frameon=False, fontsize=10)
    figure.tight_layout(rect=(0, 0.06 + 0.03 * ((len(labels) - 1) // 4), 1, 0.96))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=RESULTS / "comparison.json")
    parser.add_argument("--readme", action="store_true", help="write README.md and docs/measurements.md, too")
    args = parser.parse_args()
    kinds = load_results(args.file)
    print("\n\n".join(text(kind, results) for kind, results in kinds["cpus"].items()))
    plot(kinds, args.file.with_suffix(".png"))
    if args.readme:
        write_pages(kinds)


if __name__ == "__main__":
    main()
