"""The dashboard's page in a browser: every tab, by everybody, without anything from elsewhere; and its own server."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytestmark = pytest.mark.model
expect = pytest.importorskip("playwright.sync_api").expect
TABS = ("Chat", "Compare", "Load", "Configurations", "Memory", "Plan")


def test_every_tab_works_without_errors_and_for_everybody(own: Any, visit: Callable[[str], Any], axe: str) -> None:
    shown = visit(own.url)
    page = shown.page
    page.locator(".octavo-state.ready").wait_for()
    print(f"ready {time.monotonic() - own.started:.1f} s after the command")
    for name in TABS:
        shown.open_tab(name)
        expect(page.get_by_role("tab", name=name)).to_have_attribute("aria-selected", "true")
        page.wait_for_timeout(300)
        assert not shown.critical(axe), name
    assert not shown.problems
    assert httpx.post(f"{own.url}/gradio_api/upload", files={"files": b"x"}).status_code == 404, "nobody uploads here"
    assert httpx.get(own.url, headers={"Host": "rebound.example"}).status_code == 403, "another name for this machine"
    server = page.locator(".octavo-state").inner_text().split("ready at ")[1].split(",")[0]
    maps = Path(f"/proc/{own.process.pid}/maps").read_text()
    assert "numpy" in maps and "pandas" not in maps, (
        "nothing needs it until a plot is drawn, and threads would race for it"
    )
    answer = httpx.get(f"{server}/v1/models", headers={"Origin": "https://elsewhere.example"})
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
    for path in ("/", "/docs"):
        other = visit(server + path)
        other.page.wait_for_load_state("networkidle")
        assert not other.problems and not other.critical(axe), path


def test_a_chat_by_keyboard_alone(own: Any, visit: Callable[[str], Any]) -> None:
    page = visit(own.url).page
    page.locator(".octavo-state.ready").wait_for()
    press_tab_until(page, "max_tokens")
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("4")
    press_tab_until(page, "Message")
    page.keyboard.type("What is the capital of France?")
    page.keyboard.press("Enter")
    figures = page.locator("#chat .octavo-figures")
    figures.wait_for()
    assert "tok/s" in figures.inner_text() and "cut off" in figures.inner_text()
    assert page.locator("#chat [aria-label^='bot']").first.inner_text().strip()


def press_tab_until(page: Any, label: str) -> None:
    """Until the field of that label has the focus."""
    for _ in range(60):
        page.keyboard.press("Tab")
        found = "const e = document.activeElement; return e.ariaLabel || e.labels?.[0]?.innerText || ''"
        if label in page.evaluate(f"() => {{ {found} }}"):
            return
    raise AssertionError(f"no field {label!r} is reached by Tab")


@pytest.mark.slow
def test_hugging_face_beside_the_engine(own: Any, visit: Callable[[str], Any]) -> None:
    shown = visit(own.url)
    page = shown.page
    page.locator(".octavo-state.ready").wait_for()
    shown.open_tab("Compare")
    page.get_by_label("number input for Output tokens").fill("8")
    page.get_by_label("number input for Batch size").fill("2")
    page.get_by_role("button", name="Compare").click()
    page.locator("#compare-verdict :is(strong, [role=alert])").first.wait_for(timeout=180_000)
    assert "Octavo / Hugging Face" in (verdict := page.locator("#compare-verdict").inner_text()), verdict
    ours, theirs = (page.get_by_label(f"Answer of {side}").input_value() for side in ("Octavo", "Hugging Face"))
    assert ours.split()[:3] == theirs.split()[:3] != []
    rates = [
        float(text.split(" tok/s")[0].split("· ")[1])
        for text in page.locator("p.octavo-figures", has_text="tok/s ·").all_inner_texts()
    ]
    ratio = float(page.locator("#compare-verdict strong").first.inner_text().removesuffix("x"))
    assert ratio == pytest.approx(rates[0] / rates[1], rel=0.05)
    badges = page.locator(".octavo-badge").all_inner_texts()
    assert ["batch size 2" in badge for badge in badges] == [True, True]
    assert "Q4_1 weights" in badges[0] and "float32" in badges[1]
    page.get_by_label("number input for Output tokens").fill("256")
    page.get_by_role("button", name="Compare").click()
    theirs = page.get_by_label("Answer of Hugging Face")
    expect(theirs).to_have_value("")
    expect(theirs).not_to_have_value("", timeout=180_000)
    (process,) = generating(own)
    process.kill()
    page.get_by_text("Hugging Face's process ended (out of memory?)").wait_for()
    page.get_by_role("button", name="Compare").click()  # it can be pressed again
    page.get_by_text("loading the model in transformers").wait_for()
    while not (found := generating(own)):
        page.wait_for_timeout(50)
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped.").wait_for()
    found[0].wait(90)
    expect(page.get_by_role("button", name="Compare")).to_be_enabled()
    assert not shown.problems


def generating(dashboard: Any) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(dashboard.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if "octavo.dashboard.generate_process" in child.cmdline():
                found.append(child)
    return found


def test_its_server_does_not_outlive_a_dashboard_that_is_killed(open_dashboard: Callable[..., Any]) -> None:
    dashboard = open_dashboard("--", "--max-model-len", "512")
    started = psutil.Process(dashboard.process.pid).children(recursive=True)
    assert any("serve" in child.cmdline() for child in started)
    dashboard.process.kill()
    dashboard.process.wait(90)
    assert not psutil.wait_procs(started, timeout=90)[1]


def test_nothing_else_imports_gradio() -> None:
    modules = "octavo, octavo.cli.serve, octavo.entrypoints.server, octavo.cli.dashboard"
    code = f"import sys, {modules}; assert 'gradio' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_gradio_faster_leaves_nothing_behind() -> None:
    code = """
import inspect, ssl, sys
import jinja2
before = inspect.getfile, ssl.create_default_context, jinja2.Template, list(sys.meta_path)
from octavo.dashboard.gradio_import import import_gradio
import_gradio()
assert before == (inspect.getfile, ssl.create_default_context, jinja2.Template, sys.meta_path)
import gradio
assert "Textbox" in gradio.Textbox.change.__doc__, "each has its own text"
assert "pandas.core" not in sys.modules, "it takes long, and no tab needs it"
import pandas
assert list(pandas.DataFrame({"a": [1]})) == ["a"], "who does has it all the same"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
