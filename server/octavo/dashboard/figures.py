"""Figures of loads on the page: a table, a plot, files to download. Without Gradio."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from html import escape
from typing import Any
from urllib.parse import quote

from octavo.bench.sweep_table import Row, plot, table, to_csv, to_json, to_markdown
from octavo.errors import ConfigError

CSS = """
.octavo-table { width: 100%; overflow-x: auto; }
.octavo-table :is(table, thead, tbody, tr) { border: 0 !important; }
.octavo-table table { border-collapse: collapse; width: 100%; font-size: .9rem; }
.octavo-table tr th, .octavo-table tr td { padding: .3rem .6rem; text-align: right; vertical-align: top;
  border: 0 !important; border-bottom: 1px solid var(--border-color-primary) !important; }
.octavo-table td small { display: block; font-weight: 400; white-space: nowrap; }
.octavo-table code { font-size: .8rem; }
.octavo-table tr td.text, .octavo-table tr th.text { text-align: left; min-width: 18rem; }
.octavo-table td.best { font-weight: 700; color: var(--body-text-color); }
.octavo-table td.error { text-align: left; color: #b91c1c; white-space: normal; }
.dark .octavo-table td.error { color: #fca5a5; }
.octavo-plot img { max-width: 100%; border-radius: .3rem; }
.octavo-plot img.on-dark, .dark .octavo-plot img.on-light { display: none; }
.dark .octavo-plot img.on-dark { display: inline; }
.octavo-files { display: flex; flex-wrap: wrap; gap: .5rem; }
.octavo-files a { padding: .3rem .8rem; border: 1px solid var(--border-color-primary); border-radius: .4rem; }
.octavo-progress progress { appearance: none; border: 0; width: 100%; height: .6rem; border-radius: .3rem;
  overflow: hidden; background: var(--border-color-primary); }
.octavo-progress progress::-webkit-progress-bar { background: var(--border-color-primary); }
.octavo-progress progress::-webkit-progress-value { background: #2563eb; }
.octavo-progress progress::-moz-progress-bar { background: #2563eb; }
"""


def table_html(rows: list[Row], with_command: bool) -> str:
    """The table of `octavo bench sweep`; the best under each load in bold. A row without figures says why."""
    if not rows:
        return ""
    headings, cells, best = table(rows)
    shown = len(headings) if with_command else len(headings) - 1
    num_names = 1 + len(rows[0].configuration)
    kinds = {"command": ' class="text"'}
    head = "".join(f'<th scope="col"{kinds.get(name, "")}>{escape(name)}</th>' for name in headings[:shown])
    body = []
    for row, line, bold in zip(rows, cells, best, strict=True):
        texts = [
            f'<td class="best"><strong>{_cell(cell)}</strong></td>' if i in bold else f"<td>{_cell(cell)}</td>"
            for i, cell in enumerate(line)
        ]
        texts[-1] = f'<td class="text"><code>{escape(line[-1])}</code></td>'
        if row.error and not row.reports:
            span = len(headings) - 1 - num_names
            texts[num_names:-1] = [f'<td class="error" colspan="{span}">{escape(row.error)}</td>']
        body.append(f"<tr>{''.join(texts if with_command else texts[:-1])}</tr>")
    return (
        '<div class="octavo-table" role="region" aria-label="Figures" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _cell(text: str) -> str:
    """The lowest and the highest below the median."""
    median, _, spread = escape(text).partition(" (")
    return f"{median} <small>({spread}</small>" if spread else median


def progress_html(done: int, total: int, text: str) -> str:
    """A bar of loads that are measured."""
    return (
        f'<div class="octavo-progress" role="status"><label>{escape(text)}'
        f'<progress max="{total}" value="{done}"></progress></label></div>'
    )


def num_done(rows: list[Row], repeats: int) -> int:
    """Return the number of loads that have figures or will have none."""
    return sum(len(row.reports) if not row.error else max(len(row.reports), repeats) for row in rows)


def plot_png(rows: list[Row], dark: bool = False) -> bytes:
    """The plot of `octavo bench sweep --plot`, or the same for a dark page; empty where there is nothing to draw, or
    nothing to draw it with."""
    if not any(row.reports for row in rows):
        return b""
    file = io.BytesIO()
    try:
        plot(rows, file, dark)
    except ConfigError:  # no matplotlib
        return b""
    return file.getvalue()


def plot_html(light: bytes, dark: bytes) -> str:
    """The plot on the page: that of the colours which the page has."""
    if not light:
        return ""
    alt = "tokens per second, time to the first token and between tokens, over the number of users"
    images = (
        f'<img class="{name}" alt="{alt}" src="data:image/png;base64,{b64encode(png).decode()}">'
        for name, png in (("on-light", light), ("on-dark", dark))
    )
    return f'<div class="octavo-plot">{"".join(images)}</div>'


def to_json_lines(rows: list[Row]) -> str:
    """One object a line for each measurement, as `octavo bench serve --save-result --append-result` writes them."""
    return "".join(json.dumps(report) + "\n" for row in rows for report in row.reports)


def files_html(rows: list[Row], png: bytes, name: str, as_lines: bool = False) -> str:
    """Links that save the figures: ``name``.json, .csv, .md and .png. ``as_lines``: JSON as `octavo bench serve` writes
    it, else as `octavo bench sweep` does. The files are in the links: the server keeps none."""
    if not any(row.reports for row in rows):
        return ""
    texts: dict[str, tuple[str, str, Any]] = {
        "JSON": ("json", "application/json", to_json_lines(rows) if as_lines else to_json(rows)),
        "CSV": ("csv", "text/csv", to_csv(rows)),
        "Markdown": ("md", "text/markdown", to_markdown(rows)),
    }
    links = [
        f'<a download="{name}.{ending}" href="data:{kind};charset=utf-8,{quote(text)}">{title}</a>'
        for title, (ending, kind, text) in texts.items()
    ]
    if png:
        links.append(f'<a download="{name}.png" href="data:image/png;base64,{b64encode(png).decode()}">PNG</a>')
    return f'<div class="octavo-files" role="group" aria-label="Download">{"".join(links)}</div>'
