"""When `octavo dashboard` can be used: `python -m benchmarks dashboard_start`, in chromium. Seconds after the command.

Its address is printed, the field of the chat takes text, the model is ready; and the processor time of each part until
the field takes text. The best of some starts: other programs only make it slower.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

import psutil
from playwright.sync_api import sync_playwright


def cpu_seconds(process: psutil.Process) -> float:
    """Of it and of its children that run."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def measure(page: Any) -> dict[str, float]:
    """One start, seen by ``page``: an empty tab of a browser that runs."""
    own = psutil.Process()
    before = cpu_seconds(own)
    with tempfile.NamedTemporaryFile("r") as log:
        started = time.monotonic()
        command = [sys.executable, "-m", "octavo.cli.main", "dashboard", "--port", "0"]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log.fileno()) as dashboard:
            try:
                while (found := re.search(r"dashboard at (\S+)", log.read())) is None:
                    assert dashboard.poll() is None, "it has ended"
                    log.seek(0)
                    time.sleep(0.01)
                address = time.monotonic() - started
                page.goto(found[1], wait_until="commit")
                page.get_by_label("Message", exact=True).wait_for()
                usable = time.monotonic() - started
                process = psutil.Process(dashboard.pid)
                alone, both = sum(process.cpu_times()[:2]), cpu_seconds(process)
                browser = cpu_seconds(own) - before - both
                page.locator(".octavo-state.ready").wait_for(timeout=60_000)
                ready = time.monotonic() - started
            finally:
                dashboard.terminate()
    return {
        "address printed": address,
        "page usable": usable,
        "model ready": ready,
        "processor: dashboard": alone,
        "processor: server": both - alone,
        "processor: browser": browser,
    }


def main() -> None:
    """Print each figure's best and median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=5)
    args = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("needs chromium: apt-get install chromium")
    found = []
    with sync_playwright() as playwright:
        for _ in range(args.starts):
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            found.append(measure(browser.new_page()))
            browser.close()
    for name in found[0]:
        values = sorted(one[name] for one in found)
        print(f"{name:22} {values[0]:6.2f} s, median {values[len(values) // 2]:.2f} s")


if __name__ == "__main__":
    main()
