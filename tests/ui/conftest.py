"""The dashboard in Debian's chromium, which may reach this machine alone. Without chromium its tests are skipped."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.scripted_server import ScriptedServer

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
AXE = "axe-core@4.14.1"
TIMEOUT = 60_000  # ms: for what a machine with nothing else to do shows in one or two seconds


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("ui")
            if CHROMIUM is None:
                item.add_marker(pytest.mark.skip(reason="needs chromium: apt-get install chromium"))


class Dashboard:
    """A running `octavo dashboard`."""

    def __init__(self, folder: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        self._log = folder / "log"
        self.started = time.monotonic()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "octavo.cli.main", "dashboard", "--port", "0", *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(env or {})},
            )
        while (found := re.search(r"dashboard at (http\S+)", self.log)) is None:
            assert self.process.poll() is None, self.log
            assert time.monotonic() - self.started < 120, self.log
            time.sleep(0.02)
        self.url = found[1]

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """By SIGTERM."""
        self.process.terminate()
        self.process.wait(90)


@pytest.fixture(scope="session")
def open_dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Dashboard]]:
    """``open_dashboard("--url", ...)``; all are ended with the session, and have ended what they started."""
    opened: list[Dashboard] = []

    def open_dashboard(*flags: str, env: dict[str, str] | None = None) -> Dashboard:
        opened.append(Dashboard(tmp_path_factory.mktemp("dashboard"), *flags, env=env))
        return opened[-1]

    yield open_dashboard
    for dashboard in opened:
        started = [] if dashboard.process.poll() is not None else psutil.Process(dashboard.process.pid).children(True)
        dashboard.stop()
        assert not psutil.wait_procs(started, timeout=90)[1], "what a dashboard starts ends with it"
        assert "was never retrieved" not in dashboard.log, dashboard.log


@pytest.fixture(scope="session")
def own(open_dashboard: Callable[..., Dashboard]) -> Dashboard:
    """One with a server of its own, for the embedded model."""
    return open_dashboard("--", "--max-model-len", "1024", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "64MiB")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium with a profile of its own. Not for the session: while Playwright runs, so does its event loop, and tests
    of other folders that come after these in the same process cannot run theirs."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=TIMEOUT)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


class Page:
    """A tab of the browser, and what went wrong in it: errors on its console, and requests that failed."""

    def __init__(self, browser: Any, url: str) -> None:
        self.page = browser.new_page(viewport={"width": 1280, "height": 900})
        self.page.set_default_timeout(TIMEOUT)
        self.problems: list[str] = []
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("requestfailed", self._failed)
        self.page.goto(url)

    def _heard(self, message: Any) -> None:
        if message.type == "error":
            self.problems.append(message.text)

    def _failed(self, request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # a stream that the page itself has closed
            self.problems.append(f"{request.url}: {request.failure}")

    def open_tab(self, name: str) -> None:
        """Show a tab of the dashboard."""
        self.page.get_by_role("tab", name=name).click()

    def critical(self, axe: str) -> list[str]:
        """What axe calls critical on what is shown."""
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(axe)
        # Contrast takes longest and is never critical.
        options = "{resultTypes: ['violations'], rules: {'color-contrast': {enabled: false}}}"
        found = self.page.evaluate(f"axe.run(document, {options})")
        return [
            f"{problem['id']}: {problem['help']}: {[node['html'][:200] for node in problem['nodes']]}"
            for problem in found["violations"]
            if problem["impact"] == "critical"
        ]


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[[str], Page]]:
    """``visit(url)``: a page of a new visitor, closed at the end."""
    pages: list[Page] = []

    def visit(url: str) -> Page:
        pages.append(Page(browser, url))
        return pages[-1]

    yield visit
    for page in pages:
        page.page.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The text of axe-core, out of npm's registry, kept in ~/.cache/octavo."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo" / "npm"
    script = cache / AXE / "package" / "axe.min.js"
    if not script.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("needs npm for axe-core")
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=cache) as scratch:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = subprocess.run([npm, "pack", AXE], cwd=scratch, capture_output=True, text=True, timeout=120)
            if done.returncode:
                pytest.skip(f"axe-core cannot be had: {done.stderr[-300:]}")
            (archive,) = Path(scratch).glob("*.tgz")
            script.parent.parent.mkdir(exist_ok=True)
            subprocess.run(["tar", "-xzf", archive, "-C", script.parent.parent], check=True)
    return script.read_text()


@pytest.fixture(scope="session")
def scripted() -> Iterator[ScriptedServer]:
    """A server that says what a test wants to see shown."""
    with ScriptedServer() as server:
        yield server


@pytest.fixture(scope="session")
def scripted_dashboard(scripted: ScriptedServer, open_dashboard: Callable[..., Dashboard]) -> Dashboard:
    """One that looks at the scripted server."""
    return open_dashboard("--url", f"{scripted.url}/v1")
