"""The figures of a sweep as a table, a file, a plot."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from octavo.bench.report import Report, percentile
from octavo.errors import ConfigError

# Heading -> (key of a load's figures, digits, whether more is better; None: neither)
COLUMNS: dict[str, tuple[str, int, bool | None]] = {
    "tok/s": ("output_throughput", 1, True),
    "req/s": ("request_throughput", 2, True),
    "TTFT p50 ms": ("median_ttft_ms", 0, False),
    "TTFT p99 ms": ("p99_ttft_ms", 0, False),
    "ITL p50 ms": ("median_itl_ms", 1, False),
    "ITL p99 ms": ("p99_itl_ms", 1, False),
    "KV peak %": ("kv_cache_peak", 1, None),
    "prefix hits %": ("prefix_hit_rate", 0, None),
}
_PERCENT = ("kv_cache_peak", "prefix_hit_rate")


@dataclass
class Row:
    """One configuration under one load. ``reports``: the figures of each time it was measured."""

    configuration: dict[str, str]
    users: int
    command: str
    reports: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    def add(self, report: Report, about: dict[str, Any]) -> None:
        """Take one measurement's figures, and what else there is to say of it."""
        if not report.completed:
            self.error = next((result.error for result in report.results if result.error), "no request succeeded")
            return
        self.reports.append(report.record(about))

    def values(self, key: str) -> list[float]:
        """Return the values of all measurements, shares in percent; empty if the server does not report them."""
        factor = 100.0 if key in _PERCENT else 1.0
        return [factor * report[key] for report in self.reports if key in report]

    def median(self, heading: str) -> float | None:
        """The median of a column, None without figures."""
        values = self.values(COLUMNS[heading][0])
        return percentile(values, 50) if values else None

    def cell(self, heading: str) -> str:
        """The median and, of several measurements, the lowest and the highest."""
        key, digits, _ = COLUMNS[heading]
        values = self.values(key)
        if not values:
            return "-"
        text = f"{percentile(values, 50):.{digits}f}"
        low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
        return text if low == high else f"{text} ({low}-{high})"


def best_of(rows: list[Row], users: int, heading: str) -> float | None:
    """The best median of a column among the configurations under one load; None where there is nothing to compare."""
    medians = [m for row in rows if row.users == users and (m := row.median(heading)) is not None]
    more = COLUMNS[heading][2]
    if more is None or len(set(medians)) < 2:
        return None
    return max(medians) if more else min(medians)


def table(rows: list[Row]) -> tuple[list[str], list[list[str]], list[set[int]]]:
    """Headings, cells, and of each row the columns that are the best under its load."""
    names = list(rows[0].configuration) if rows else []
    headings = ["users", *names, *COLUMNS, "command"]
    cells = [
        [str(row.users), *row.configuration.values(), *(row.cell(name) for name in COLUMNS), row.command]
        for row in rows
    ]
    first = 1 + len(names)
    best = [
        {
            first + i
            for i, name in enumerate(COLUMNS)
            if (value := row.median(name)) is not None and value == best_of(rows, row.users, name)
        }
        for row in rows
    ]
    return headings, cells, best


def print_table(rows: list[Row]) -> None:
    """Print the table to the terminal, the best values in bold; commands follow, once each."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    headings, cells, best = table(rows)
    console = Console()
    if not console.is_terminal:
        console.width = 200  # of a file or a pipe: no line is broken
    shown = Table(*headings[:-1], box=None, pad_edge=False)
    for line, bold in zip(cells, best, strict=True):
        shown.add_row(*(Text(cell, "bold" if i in bold else "") for i, cell in enumerate(line[:-1])))
    console.print(shown)
    for command in dict.fromkeys(row.command for row in rows):
        console.print(command, highlight=False, soft_wrap=True)


def to_markdown(rows: list[Row]) -> str:
    """A table of Markdown, the best in bold."""
    headings, cells, best = table(rows)
    lines = [f"| {' | '.join(headings)} |", f"|{' --- |' * len(headings)}"]
    for line, bold in zip(cells, best, strict=True):
        line = [f"**{cell}**" if i in bold else cell for i, cell in enumerate(line[:-1])] + [f"`{line[-1]}`"]
        lines.append(f"| {' | '.join(line)} |")
    return "\n".join(lines) + "\n"


def to_csv(rows: list[Row]) -> str:
    """Medians, one line a row."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    headings, _, _ = table(rows)
    writer.writerow(headings)
    for row in rows:
        medians = ["" if (value := row.median(name)) is None else f"{value:.4f}" for name in COLUMNS]
        writer.writerow([row.users, *row.configuration.values(), *medians, row.command])
    return out.getvalue()


def to_json(rows: list[Row]) -> str:
    """Every measurement as `octavo bench serve --save-result` writes it."""
    found = [
        {
            "users": row.users,
            "configuration": row.configuration,
            "command": row.command,
            "error": row.error or None,
            "runs": row.reports,
        }
        for row in rows
    ]
    return json.dumps(found, indent=1) + "\n"


def from_json(text: str) -> list[Row]:
    """The rows that `to_json` has written."""
    return [
        Row(one["configuration"], one["users"], one["command"], one["runs"], one["error"] or "")
        for one in json.loads(text)
    ]


def save(rows: list[Row], path: Path, kind: str) -> None:
    """Write ``kind`` ("json", "csv", "markdown" or "plot") to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "plot":
        plot(rows, path)
    else:
        path.write_text({"json": to_json, "csv": to_csv, "markdown": to_markdown}[kind](rows))


def plot(rows: list[Row], path: Path | IO[bytes], dark: bool = False) -> None:
    """A PNG: tokens per second, time to first token and between tokens over the number of users, a line for each
    configuration. ``dark``: for a dark page, which shows through."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("a plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.style.context(["dark_background", {"savefig.transparent": True}] if dark else "default"):
        figure = _drawn(rows, pyplot)
        figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _drawn(rows: list[Row], pyplot: Any) -> Any:
    """The figure of `plot`."""
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4))
    lines: dict[str, list[Row]] = {}
    for row in rows:
        name = ", ".join(f"{key}={value}" for key, value in row.configuration.items()) or row.command
        lines.setdefault(name, []).append(row)
    for axis, heading in zip(axes, ("tok/s", "TTFT p50 ms", "ITL p50 ms"), strict=True):
        for name, own in lines.items():
            points = [(row.users, m) for row in own if (m := row.median(heading)) is not None]
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
        axis.set_xlabel("users")
        axis.set_title(heading)
        axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
        axis.set_xticks(sorted({row.users for row in rows}))
    if len(lines) > 1:
        axes[0].legend(fontsize=8)
    figure.tight_layout()
    return figure
