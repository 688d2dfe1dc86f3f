"""The dashboard's tabs that measure, look into memory and plan, in a browser before a real server."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

expect = pytest.importorskip("playwright.sync_api").expect
pytestmark = pytest.mark.model


@pytest.fixture
def tab(own: Any, visit: Callable[[str], Any], axe: str) -> Iterator[Callable[[str], Any]]:
    """``tab(name)``: that tab of the dashboard, once the server is ready. At the end nothing may have gone wrong."""
    shown = visit(own.url)

    def open_tab(name: str) -> Any:
        shown.page.locator(".octavo-state.ready").wait_for()
        shown.open_tab(name)
        return shown.page

    yield open_tab
    assert not shown.critical(axe)
    assert not shown.problems


def field(page: Any, name: str) -> Any:
    return page.get_by_label(re.compile(rf"^\s*{re.escape(name)}")).locator("visible=true")


def rows_of(page: Any) -> list[dict[str, str]]:
    """The table's rows, by heading."""
    table = page.locator(".octavo-table").locator("visible=true")
    names = table.locator("th").all_inner_texts()
    return [
        dict(zip(names, row.locator("td").all_inner_texts(), strict=True)) for row in table.locator("tbody tr").all()
    ]


def test_a_load_by_keyboard(tab: Callable[[str], Any]) -> None:
    """The table, the files and `octavo bench serve` have the same figures: they are the same code's."""
    page = tab("Load")
    for name, value in {"Users": "1, 3", "Requests of each": "2", "Prompt tokens": "40", "Answer tokens": "5"}.items():
        field(page, name).focus()
        page.keyboard.press("ControlOrMeta+a")
        page.keyboard.type(value)
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the button after the fields
    page.get_by_text("2 of 2 loads measured: done").wait_for()
    rows = rows_of(page)
    assert [row["users"] for row in rows] == ["1", "3"] and next(iter(rows[0])) == "users"
    with page.expect_download() as download:
        page.get_by_role("link", name="JSON").click()
    assert download.value.suggested_filename == "octavo-load.json"
    found = [json.loads(line) for line in Path(download.value.path()).read_text().splitlines()]
    assert [(one["max_concurrency"], one["completed"], one["failed"]) for one in found] == [(1, 2, 0), (3, 6, 0)]
    assert [one["total_output_tokens"] for one in found] == [10, 30]
    for one, row in zip(found, rows, strict=True):
        assert row["tok/s"] == f"{one['output_throughput']:.1f}" and row["req/s"] == f"{one['request_throughput']:.2f}"
        for metric in ("ttft", "itl"):
            digits = 0 if metric == "ttft" else 1
            assert row[f"{metric.upper()} p50 ms"] == f"{one[f'median_{metric}_ms']:.{digits}f}"
            assert row[f"{metric.upper()} p99 ms"] == f"{one[f'p99_{metric}_ms']:.{digits}f}"
        assert row["KV peak %"] != "-" and {"date", "backend", "model_id", "request_rate"} <= one.keys()
    plots = page.locator(".octavo-plot img").locator("visible=true")
    assert [plots.count(), plots.get_attribute("class")] == [1, "on-light"]
    page.evaluate("document.body.classList.add('dark')")
    assert [plots.count(), plots.get_attribute("class")] == [1, "on-dark"]
    for title in ("CSV", "Markdown", "PNG"):
        assert page.get_by_role("link", name=title).is_visible()


@pytest.mark.slow
def test_configurations_stop_with_their_servers(tab: Callable[[str], Any], own: Any) -> None:
    """What was measured until then stays; a field that makes no sense is said at once."""
    page = tab("Configurations")
    field(page, "Others, one a line").fill("block_sise=16")
    page.get_by_role("button", name="Run", exact=True).locator("visible=true").click()
    page.get_by_text("did you mean --block-size").wait_for()
    field(page, "Others, one a line").fill("")
    for name, value in {"Users": "1", "Requests of each": "1", "Repeats": "9", "Answer tokens": "4"}.items():
        field(page, name).fill(value)
    page.get_by_role("button", name="Run", exact=True).locator("visible=true").click()
    page.get_by_text(re.compile(r"^[1-9]\d* of 18 loads measured")).wait_for()
    deadline = time.monotonic() + 60
    while not measured(own):  # between two of them there is none
        assert time.monotonic() < deadline, "no server with other flags runs"
        page.wait_for_timeout(50)
    page.get_by_role("button", name="Stop", exact=True).locator("visible=true").click()
    page.get_by_text(re.compile("loads measured: stopped")).wait_for()
    assert not measured(own)
    first, second = rows_of(page)
    assert (first["max_num_seqs"], second["max_num_seqs"]) == ("8", "64") and float(first["tok/s"].split()[0]) > 0
    assert first["command"].startswith("octavo serve ") and first["command"].endswith(" --max-num-seqs 8")


def measured(dashboard: Any) -> list[list[str]]:
    """Servers of the sweep that run."""
    found = []
    for child in psutil.Process(dashboard.process.pid).children(recursive=True):
        try:
            found.append(child.cmdline())
        except psutil.NoSuchProcess:
            continue
    return [words for words in found if words.count("--max-num-seqs") == 2]


@contextmanager
def streaming(address: str, prompt: list[int]) -> Iterator[str]:
    """The id of an answer that has begun."""
    body = {"prompt": prompt, "max_tokens": 500, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        yield json.loads(next(lines)[6:])["id"]


@pytest.mark.slow
def test_blocks_light_up(tab: Callable[[str], Any]) -> None:
    """512 tokens that two requests begin with are 32 blocks, shared while both run and cached afterwards."""
    page = tab("Memory")
    page.get_by_text(re.compile(r"weights \d+ MiB")).wait_for()
    ready = page.locator(".octavo-state.ready").inner_text()
    address, prompt = re.findall(r"http://\S+?(?=,|$)", ready)[0], [1000 + i for i in range(512)]
    with streaming(address, [*prompt, 7]) as one, streaming(address, [*prompt, 8]):
        page.get_by_text("shared ×2 32", exact=True).wait_for()
        saves = page.locator("dl div", has_text="Prompt sharing saves")
        assert "32 blocks" in saves.inner_text()
        field(page, "Request").fill(one)
        page.keyboard.press("Enter")
        page.get_by_text(re.compile(rf"of {one[:24]}, shared 32$")).wait_for()
    page.get_by_text("used 0", exact=True).wait_for()
    page.get_by_text(re.compile("^shared")).first.wait_for(state="detached")
    cached = page.get_by_text(re.compile(r"^cached \d"))
    assert int(cached.inner_text().split()[-1].replace(",", "")) >= 32
    with page.expect_request(re.compile("/queue/")):
        pass  # it looks again while the tab is open
    page.get_by_role("tab", name="Load").click()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for _ in range(20):  # what was under way may come to its end
        asked.clear()
        page.wait_for_timeout(1500)
        if not asked:
            break
    assert not asked, "and not after that"


def test_memory_names_the_flag_that_is_missing(scripted_dashboard: Any, visit: Callable[[str], Any]) -> None:
    shown = visit(scripted_dashboard.url)
    shown.open_tab("Memory")
    shown.page.get_by_text("--management-url").wait_for()
    assert not shown.problems


def test_a_plan(tab: Callable[[str], Any], tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    page = tab("Plan")
    page.get_by_role("heading", name="Fits").wait_for()  # of the model that is served, before anything is pressed
    field(page, "Model").fill(str(tmp_path))
    field(page, "Memory").fill("8GiB")
    page.get_by_role("button", name="Plan", exact=True).click()
    page.get_by_role("heading", name="Will not start").wait_for()
    field(page, "Memory").fill("80GiB")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Fits").wait_for()
    assert page.locator("dl div", has_text="KV cache of a token").get_by_text("131,072 bytes").is_visible()
    assert "kind: LLMDeployment" in page.locator("#plan-yaml code").inner_text()
    field(page, "Memory").fill("much")
    page.keyboard.press("Enter")
    expect(page.locator("[role=status]", has_text="No plan: ")).to_contain_text("--memory")
    assert page.get_by_role("heading", name="Fits").count() == 0, "what is shown is no plan of these fields"
