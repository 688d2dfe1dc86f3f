"""Configurations beside each other: what is measured, in which order, and what the table makes of it."""

from __future__ import annotations

import argparse
import csv
import io
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.bench import sweep as module
from octavo.bench.client import RequestResult
from octavo.bench.report import Report
from octavo.bench.sweep import Sweep, add_arguments, flags_of, measure_all
from octavo.bench.sweep_table import Row, best_of, print_table, save, table, to_csv, to_markdown
from octavo.errors import ConfigError, OctavoError


def sweep_of(*words: str) -> Sweep:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return Sweep.of(parser.parse_args(words))


def report_of(tok_s: float, ttft: float = 0.1) -> Report:
    result = RequestResult(5, success=True, output_tokens=int(tok_s), ttft=ttft, itls=[0.02], latency=ttft + 0.02)
    return Report([result], 1.0, {})


def test_every_combination_is_a_configuration() -> None:
    found = sweep_of(
        "--param", "enable_prefix_caching=on,off", "--param", "block-size=16,32", "--users", "1,5", "--", "my-model"
    )
    assert [flags_of(configuration) for configuration in found.configurations] == [
        [switch, "--block-size", size]
        for switch in ("--enable-prefix-caching", "--no-enable-prefix-caching")
        for size in ("16", "32")
    ]
    assert (found.serve_args, found.users, found.num_loads) == (("my-model",), (1, 5), 16)
    assert flags_of({"quantization": "none", "max_num_seqs": "8"}) == ["--max-num-seqs", "8"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--param", "block_sise=16"], "did you mean --block-size"),
        (["--param", "block_size"], "NAME=VALUE"),
        (["--param", "block_size=16,"], "NAME=VALUE"),
        (["--param", "block_size=16", "--param", "block_size=32"], "twice"),
        (["--param", "block_size=big"], "--block-size"),
        (["--param", "enable_prefix_caching=maybe"], "on and off"),
        (["--users", "1,x"], "--users"),
        (["--users", "0"], "--users"),
        (["--repeats", "0"], "--repeats"),
        (["--base-url", "http://127.0.0.1:1", "--param", "block_size=16"], "--base-url"),
        (["--", "--no-such-flag"], "--no-such-flag"),
    ],
)
def test_mistakes_are_said_before_a_server_starts(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        sweep_of(*words)


def test_configurations_are_measured_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A B B A; a server that does not start is an error in its own rows only."""
    started: list[str] = []

    @contextmanager
    def server(flags: list[str]) -> Iterator[SimpleNamespace]:
        started.append(flags[-1])
        if flags[-1] == "64":
            raise OctavoError("no memory")
        yield SimpleNamespace(url=flags[-1])

    loads: list[tuple[str, int]] = []

    def load(sweep: Sweep, url: str, users: int, repeat: int, tokenizer: object) -> tuple[Report, dict[str, float]]:
        loads.append((url, users))
        return report_of(100.0), {"kv_cache_peak": 0.5}

    monkeypatch.setattr(module, "local_server", server)
    monkeypatch.setattr(module, "_measure_load", load)
    monkeypatch.setattr(module, "load_tokenizer", lambda name: None)
    seen = Counter[int]()
    rows = measure_all(
        sweep_of("--param", "block_size=16,32,64", "--users", "1,5"),
        lambda rows: seen.update([sum(len(row.reports) for row in rows)]),
    )
    assert started == ["16", "32", "64", "64", "32", "16"]
    assert loads == [("16", 1), ("16", 5), ("32", 1), ("32", 5), ("32", 1), ("32", 5), ("16", 1), ("16", 5)]
    assert [(len(row.reports), row.error) for row in rows] == [(2, "")] * 4 + [(0, "no memory")] * 2
    assert rows[0].command == "octavo serve --block-size 16" and max(seen) == 8


def test_a_table_shows_the_best_of_each_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row({"block_size": size}, users, f"octavo serve {size}") for size in ("16", "32") for users in (1, 5)]
    for row, figures in zip(rows, ([100.0, 120.0], [50.0], [105.0, 107.0], [60.0]), strict=True):
        for tok_s in figures:
            row.add(report_of(tok_s, ttft=0.1 if row.users == 1 else 1 / tok_s), {})
    headings, cells, best = table(rows)
    column = headings.index("tok/s")
    assert [line[column] for line in cells] == ["110.0 (100.0-120.0)", "50.0", "106.0 (105.0-107.0)", "60.0"]
    assert [column in bold for bold in best] == [True, False, False, True]
    assert best_of(rows, 1, "TTFT p50 ms") is None, "equal figures have no best"
    assert best_of(rows, 5, "TTFT p50 ms") == pytest.approx(1000 / 60)
    assert cells[0][headings.index("KV peak %")] == "-", "a server without such metrics"
    assert "| **60.0** |" in to_markdown(rows)
    line = next(csv.DictReader(io.StringIO(to_csv(rows))))
    assert (line["users"], line["block_size"], float(line["tok/s"])) == ("1", "16", 110.0)
    print_table(rows)
    assert "110.0 (100.0-120.0)" in (shown := capsys.readouterr().out) and shown.count("octavo serve 16") == 1
    pytest.importorskip("matplotlib")
    save(rows, tmp_path / "new" / "plot.png", "plot")
    assert (tmp_path / "new" / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_metrics_are_read_as_requests_are_sent() -> None:
    """With the key: without it the server tells nothing of its KV cache."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["Authorization"] == "Bearer key"
            self.send_response(200 if known else 401)
            self.end_headers()
            if known:
                self.wfile.write(b'vllm:kv_cache_usage_perc{engine="0"} 0.25\n')

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    args = sweep_of("--base-url", f"http://127.0.0.1:{server.server_port}", "--api-key", "key").args
    with module._Metrics(args) as metrics:
        metrics._peak = metrics._read()["vllm:kv_cache_usage_perc"]
    server.shutdown()
    server.server_close()
    assert metrics.figures() == {"kv_cache_peak": 0.25, "prefix_hit_rate": 0.0}
