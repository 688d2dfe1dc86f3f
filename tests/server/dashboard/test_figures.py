"""Figures on the page are those that `octavo bench` writes."""

from __future__ import annotations

import io
import json
import re
from base64 import b64decode
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image

from octavo.bench.client import RequestResult
from octavo.bench.report import Report
from octavo.bench.sweep_table import Row, from_json, to_csv, to_json, to_markdown
from octavo.dashboard.figures import files_html, num_done, plot_html, plot_png, table_html


def rows_of(*rates: int) -> list[Row]:
    rows = []
    for users, rate in enumerate(rates, 1):
        result = RequestResult(5, success=True, output_tokens=rate, ttft=0.1 * users, itls=[0.02], latency=0.3)
        rows.append(Row({"block_size": "16"}, users, "octavo serve <16>"))
        rows[-1].add(Report([result], 2.0, {}), {"max_concurrency": users, "kv_cache_peak": 0.25})
    return rows


def cells(html: str) -> list[list[str]]:
    return [
        [re.sub("<[^>]*>", "", cell).strip() for cell in re.findall("<td.*?</td>", line)]
        for line in re.findall("<tr>.*?</tr>", html)
    ][1:]


def test_the_table_is_that_of_the_sweep() -> None:
    rows = rows_of(100, 150)
    shown = table_html(rows, with_command=False)
    assert cells(shown)[1] == ["2", "16", "75.0", "0.50", "200", "200", "20.0", "20.0", "25.0", "-"]
    assert shown.index("users") < shown.index("tok/s") and "command" not in shown
    assert "octavo serve &lt;16&gt;" in table_html(rows, with_command=True)
    rows[0].add(Report([RequestResult(5, success=True, output_tokens=120)], 2.0, {}), {})
    assert cells(table_html(rows, with_command=False))[0][2] == "55.0 (50.0-60.0)"
    rows.append(Row({"block_size": "x"}, 1, "octavo serve x", error="no <memory>"))
    assert cells(table_html(rows, with_command=True))[2] == ["1", "x", "no &lt;memory&gt;", "octavo serve x"]
    assert num_done(rows, repeats=2) == 2 + 1 + 2
    assert table_html([], with_command=True) == ""


def test_a_plot_can_be_read_on_the_page_that_it_is_on() -> None:
    """Its letters are dark on a light page, and light on a dark one, which shows through."""
    pytest.importorskip("matplotlib")
    for dark in (False, True):
        picture = Image.open(io.BytesIO(plot_png(rows_of(100, 150), dark=dark))).convert("RGBA")
        pixels = np.asarray(picture)
        assert pixels[0, 0, 3] == (0 if dark else 255), "the page shows through"
        solid = pixels[pixels[..., 3] == 255]
        gray = solid[(solid[:, 0] == solid[:, 1]) & (solid[:, 1] == solid[:, 2])][:, 0]
        assert (gray.min() > 128 and gray.max() == 255) if dark else gray.min() < 64
    shown = plot_html(b"one", b"two")
    assert re.findall(r'class="(on-\w+)".*?base64,(\w+)', shown) == [("on-light", "b25l"), ("on-dark", "dHdv")]
    assert plot_html(b"", b"") == ""


def test_files_are_in_their_links() -> None:
    rows = rows_of(100, 150)
    assert [(row.users, row.reports) for row in from_json(to_json(rows))] == [(row.users, row.reports) for row in rows]
    pytest.importorskip("matplotlib")
    found = dict(
        re.findall(r'download="load\.(\w+)" href="data:[^,]*,([^"]*)"', files_html(rows, plot_png(rows), "load"))
    )
    assert [json.loads(unquote(found["json"])), unquote(found["csv"]), unquote(found["md"])] == [
        json.loads(to_json(rows)),
        to_csv(rows),
        to_markdown(rows),
    ]
    assert b64decode(found["png"])[:4] == b"\x89PNG"
    lines = files_html(rows, b"", "load", as_lines=True)
    one, two = map(json.loads, unquote(re.findall(r'href="data:[^,]*,([^"]*)"', lines)[0]).splitlines())
    assert (one["max_concurrency"], two["output_throughput"], two["median_ttft_ms"]) == (1, 75.0, 200.0)
    assert files_html([Row({}, 1, "")], b"", "load") == "" == plot_png([]).decode()
