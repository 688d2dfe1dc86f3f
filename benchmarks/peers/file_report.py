"""What `make bench ARGS=--files` has found: a table for each kind of processor, ratios, goals, a plot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.report import Goal
from benchmarks.sections import replace_section

RESULTS = Path(__file__).parents[1] / "results" / "files.json"
DOCS = Path(__file__).parents[2] / "docs"
OURS = "Octavo"
SAME_PRECISION = ("smollm2-bf16", "smollm2-fp32", "llama-1b-bf16", "qwen3-0.6b-bf16", "qwen3-4b-bf16")
QUANTISED = ("awq", "gptq", "w8a8")
LARGE = ("qwen3-4b-q4_k_m",)  # memory decides for one user, so that less is gained there
COLOURS = {OURS: "#d1495b", "vLLM": "#2e6f95", "llama.cpp": "#3a7d44"}

Cell = dict[str, Any]


@dataclass(frozen=True)
class File:
    """All engines' cells of one file, by engine."""

    name: str
    title: str
    cells: dict[str, Cell]

    def figure(self, engine: str, *keys: str) -> float | None:
        """Of one engine, by the path of keys."""
        value: Any = self.cells.get(engine)
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return float(value) if isinstance(value, int | float) else None

    def ratio(self, *keys: str, others: tuple[str, ...] = ("llama.cpp", "vLLM"), least: bool = False) -> float | None:
        """Ours over the best of the others: the largest figure, or the ``least``."""
        ours = self.figure(OURS, *keys)
        known = [value for value in (self.figure(name, *keys) for name in others) if value]
        return ours / (min if least else max)(known) if ours and known else None


def files_of(cells: dict[str, Cell]) -> list[File]:
    """In the order in which they were first measured."""
    found: dict[str, File] = {}
    for cell in cells.values():
        found.setdefault(cell["file"], File(cell["file"], cell["title"], {})).cells[cell["engine"]] = cell
    return list(found.values())


def goals(file: File) -> Iterator[Goal]:
    """Those that the figures at hand can judge."""

    def over(what: str, bound: float, *keys: str, at_least: bool = True, **how: Any) -> Iterator[Goal]:
        ratio = file.ratio(*keys, least=not at_least, **how)
        if ratio is not None:
            yield Goal(f"{file.title}: {what}", ratio, bound, at_least)

    if file.name in SAME_PRECISION:
        for users in ("1", "8", "20"):
            yield from over(f"at {users}, vLLM's precision", 1.2, "levels", users, "tok_s", others=("vLLM",))
    if file.name in QUANTISED:
        yield from over("1 user", 3.0, "levels", "1", "tok_s", others=("vLLM",))
        yield from over("20 users", 2.0, "levels", "20", "tok_s", others=("vLLM",))
    else:
        least = 1.05 if file.name in LARGE else 1.1
        yield from over("1 user, the better of the others", least, "levels", "1", "tok_s")
        yield from over("8 users, the better of the others", 1.5, "levels", "8", "tok_s")
    yield from over("first token of 512, the better", 1.0, "ttft_512_ms", at_least=False)
    most = 0.7 if file.name in LARGE else 1.0
    yield from over("first token of a long prompt, the better", most, "long_ttft_ms", at_least=False)
    yield from over("between tokens after a long prompt, the better", 1.0, "long_itl_ms", at_least=False)
    llama = {"at_least": False, "others": ("llama.cpp",)}
    yield from over("memory after the runs, llama.cpp", 1.1, "pss_bytes_after", **llama)
    ours, theirs = file.figure(OURS, "start_cpu_s"), file.figure("llama.cpp", "start_cpu_s")
    if ours is not None and theirs is not None:
        yield Goal(f"{file.title}: CPU seconds of a start, 2 x llama.cpp's + 1", ours, 2 * theirs + 1, False, " s")


HEAD = [
    "file",
    "engine",
    "tok/s, 1 user",
    "8",
    "20",
    "first token of 512",
    "CPU ms a token, 1 user",
    "8",
    "20",
    "of a prompt",
    "ready",
    "memory",
    "long prompt: first token",
    "each",
    "measured",
]


def _number(value: float | None, unit: str = "", scale: float = 1.0) -> str:
    if value is None:
        return "–"
    value *= scale
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}{unit}"


def rows(file: File) -> Iterator[list[str]]:
    """One for each engine; what it could not serve is said in place of figures."""
    for engine, cell in file.cells.items():
        measured = f"{cell['date'][:10]} {cell['commit']}{' quick' if cell['quick'] else ''}"
        trouble = cell.get("missing") or cell.get("error")
        if trouble and not cell.get("levels"):
            yield [file.title, engine, f"not served: {_short(trouble)}", *[""] * (len(HEAD) - 4), measured]
            continue
        level = {
            (users, key): file.figure(engine, "levels", users, key)
            for users in ("1", "8", "20")
            for key in ("tok_s", "cpu_ms_token")
        }
        yield [
            file.title,
            engine,
            *(_number(level[users, "tok_s"]) for users in ("1", "8", "20")),
            _number(file.figure(engine, "ttft_512_ms"), " ms"),
            *(_number(level[users, "cpu_ms_token"]) for users in ("1", "8", "20")),
            _number(file.figure(engine, "prompt_cpu_ms_token")),
            _number(file.figure(engine, "ready_s"), " s"),
            _number(file.figure(engine, "pss_bytes_after"), " GB", 1e-9),
            _number(file.figure(engine, "long_ttft_ms"), " s", 1e-3),
            _number(file.figure(engine, "long_itl_ms"), " ms"),
            measured,
        ]


def _short(text: str, most: int = 160) -> str:
    text = " ".join(text.replace("|", ";").split())
    return text if len(text) <= most else f"… {text[-most:]}"


def ratios(file: File) -> list[str]:
    """Ours over the better of the others, where there are both."""
    by = [("levels", "1", "tok_s"), ("levels", "8", "tok_s"), ("levels", "20", "tok_s")]
    values = [file.ratio(*keys) for keys in by]
    values += [file.ratio("ttft_512_ms", least=True), file.ratio("pss_bytes_after", others=("llama.cpp",), least=True)]
    return [_number(value, "x") for value in values] if any(values) else []


def one_line(cell: Cell) -> str:
    """A cell as it is measured."""
    if "error" in cell:
        return f"FAILED: {_short(cell['error'], 300)}"
    speeds = ", ".join(f"{users} users {level['tok_s']:.1f} tok/s" for users, level in cell["levels"].items())
    busy = max(level["bystanders"] for level in cell["levels"].values())
    text = f"ready {cell['ready_s']:.1f} s, first token of 512 {cell['ttft_512_ms']:.0f} ms, {speeds}, "
    text += f"{cell['pss_bytes_after'] / 1e9:.2f} GB"
    if "long_ttft_ms" in cell:
        text += f", long prompt {cell['long_ttft_ms'] / 1e3:.2f} s"
    return text + (f"   (others took {busy:.0%} of the CPUs)" if busy > 0.1 else "")


def text(results: dict[str, Any]) -> str:
    """For the terminal: figures and goals of each kind of processor."""
    lines = []
    for kind, cells in results["cpus"].items():
        lines += [kind, ""]
        for file in files_of(cells):
            lines += ["  ".join(cell.ljust(9) for cell in row[:-1] if cell) for row in rows(file)]
        lines += ["", *(str(goal) for file in files_of(cells) for goal in goals(file)), ""]
    return "\n".join(lines)


def markdown(results: dict[str, Any]) -> str:
    """The section of docs/measurements.md."""
    lines = [
        "128 tokens in and 128 out (48 of models of 10^9 numbers and more), greedy, a closed loop of users, output "
        "tokens a second. A long prompt has 5,600 tokens, 8,192 where the model takes them. CPU time is that of all of "
        "a server's processes, prompts included. llama.cpp serves the same GGUF file or, of a checkpoint, the same "
        "values as a GGUF file in the same precision; vLLM the same checkpoint. Memory (PSS of all processes) is that "
        "after the runs. `make bench ARGS=--files`, `make bench WHAT=models`.",
    ]
    for kind, cells in results["cpus"].items():
        files = files_of(cells)
        lines += ["", f"### {kind}", "", "| " + " | ".join(HEAD) + " |", "|---|---" + "|---:" * (len(HEAD) - 2) + "|"]
        for file in files:
            for row in rows(file):
                shown = [f"**{cell}**" if row[1] == OURS and cell else cell for cell in row]
                lines.append("| " + " | ".join(shown) + " |")
        compared = [(file.title, ratios(file)) for file in files]
        if any(found for _, found in compared):
            head = "| Octavo / the better of the others | 1 user | 8 | 20 | first token of 512 | memory / llama.cpp |"
            lines += ["", head, "|---" + "|---:" * 5 + "|"]
            lines += ["| " + " | ".join([title, *found]) + " |" for title, found in compared if found]
        missed = [goal for file in files for goal in goals(file) if not goal.met]
        lines += ["", f"Goals missed: {len(missed)}." if missed else "All goals are met.", ""]
        lines += ["- " + " ".join(str(goal).split()) for goal in missed]
    if results["cpus"]:
        lines += ["", "![output tokens a second by file and engine](files.png)"]
    return "\n".join(lines)


def write_pages(results: dict[str, Any]) -> None:
    """The tables of docs/measurements.md, and the plot beside it."""
    replace_section(DOCS / "measurements.md", "files", markdown(results))
    plot(results, DOCS / "files.png")


def plot(results: dict[str, Any], path: Path) -> None:
    """Of the kind of processor that was measured last: tokens a second at 1 and at 8 users, as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullFormatter

    measured = {
        kind: max((cell["date"] for cell in cells.values()), default="") for kind, cells in results["cpus"].items()
    }
    kind = max(measured, key=lambda kind: measured[kind], default=None)
    files = (
        [file for file in files_of(results["cpus"][kind]) if file.figure(OURS, "levels", "1", "tok_s")] if kind else []
    )
    if not files:
        return
    figure, panels = pyplot.subplots(1, 2, figsize=(12.5, 1.6 + 0.45 * len(files)), sharey=True)
    for axes, users in zip(panels, ("1", "8"), strict=True):
        for offset, (engine, colour) in zip((-0.27, 0.0, 0.27), COLOURS.items(), strict=True):
            values = [file.figure(engine, "levels", users, "tok_s") or 0.0 for file in files]
            axes.barh([i + offset for i in range(len(files))], values, 0.25, color=colour, label=engine)
        axes.set_title(f"Output tokens a second, {users} user{'s' if users != '1' else ''}", fontsize=11)
        axes.set_yticks(range(len(files)), [file.title for file in files])
        axes.set_xscale("log")
        axes.set_xlim(left=1)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:,.0f}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(axis="x", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=3, frameon=False, fontsize=10)
    figure.suptitle(str(kind), fontsize=9, color="#555555", x=0.01, ha="left")
    figure.tight_layout(rect=(0, 0.05, 1, 0.98))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
