"""The part of a tab that runs `octavo bench sweep` and shows its figures."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import gradio as gr

from octavo.bench.sweep_table import Row
from octavo.dashboard.events import QUIET, Updates, errors_shown, restoring
from octavo.dashboard.figures import files_html, num_done, plot_html, plot_png, progress_html, table_html
from octavo.dashboard.session import Session
from octavo.dashboard.sweeps import SweepRun, check
from octavo.errors import OctavoError

_SHOW_SECONDS = 1.0  # between two looks of a browser while nothing changes but the time
_measuring = asyncio.Lock()  # two measurements at once would measure each other


class SweepPanel:
    """Buttons, progress, table, plot and files; `connect` says what is measured."""

    def __init__(self, session: Session, name: str, own_servers: bool) -> None:
        """``name`` of the files. ``own_servers``: the sweep starts them, its rows have commands; else it loads the
        session's server, and JSON has the form of `octavo bench serve`."""
        self._session, self._name, self._own_servers = session, name, own_servers
        self._runs: dict[str, SweepRun] = {}  # under way, by Gradio's name of the visitor
        with gr.Row():
            self._run = gr.Button("Run", variant="primary", scale=0, min_width=120)
            self._stop = gr.Button("Stop", interactive=False, scale=0, min_width=120)
        self._progress, self._table, self._plot = gr.HTML(), gr.HTML(), gr.HTML()
        self._files, self._command = gr.HTML(), gr.HTML()
        self._outputs = [self._run, self._stop, self._progress, self._table, self._plot, self._files, self._command]

    def connect(self, words: Callable[..., Sequence[str]], inputs: list[Any]) -> None:
        """``words`` makes flags of `octavo bench sweep` of the values of ``inputs``; it may raise OctavoError."""

        async def measure(request: gr.Request, key: str | None, *values: Any) -> Updates:
            with errors_shown():
                await asyncio.to_thread(self._session.find_model, key)  # it is there, and the visitor may ask it
                flags = words(*values)
                num_loads = check(flags, self._session.local).num_loads
            api_key = None if self._own_servers else self._session.api_key(key)
            run = self._runs[str(request.session_hash)] = SweepRun(flags, api_key)
            try:
                async for update in restoring(self._measure(run, flags, num_loads), self._idle):
                    yield update
            finally:
                self._runs.pop(str(request.session_hash), None)

        def stop(request: gr.Request) -> None:
            if (run := self._runs.get(str(request.session_hash))) is not None:
                run.stop()

        self._run.click(measure, [self._session.key, *inputs], self._outputs, **QUIET)
        self._stop.click(stop, None, None, **QUIET)

    def _idle(self) -> dict[Any, Any]:
        return {self._run: gr.Button(interactive=True), self._stop: gr.Button(interactive=False)}

    async def _measure(self, run: SweepRun, flags: Sequence[str], num_loads: int) -> Updates:
        rows: list[Row] = []
        began, said, png, dark = time.monotonic(), "", b"", b""
        yield {
            self._run: gr.Button(interactive=False),
            self._stop: gr.Button(interactive=True),
            self._progress: self._state(rows, num_loads, "starting"),
            self._table: "",
            self._plot: "",
            self._files: "",
            self._command: _command_html(flags),
        }
        while _measuring.locked() and not run.stopped:
            yield {self._progress: self._state([], num_loads, "waiting for another visitor's measurement")}
            await asyncio.sleep(_SHOW_SECONDS)
        try:
            if not run.stopped:
                async with _measuring, contextlib.aclosing(run.rows()) as found:
                    async for rows in found:
                        text = "stopping" if run.stopped else f"{time.monotonic() - began:.0f} s"
                        yield {self._progress: self._state(rows, num_loads, text), self._table: self._shown(rows)}
                    png = await asyncio.to_thread(plot_png, rows)  # it takes a processor, too
                    dark = await asyncio.to_thread(plot_png, rows, dark=True)
        except OctavoError as error:
            said = str(error)
        text = said or ("stopped" if run.stopped else f"done after {time.monotonic() - began:.0f} s")
        yield self._idle() | {
            self._progress: self._state(rows, num_loads, text),
            self._table: self._shown(rows),
            self._plot: plot_html(png, dark),
            self._files: files_html(rows, png, self._name, not self._own_servers),
        }

    def _shown(self, rows: list[Row]) -> str:
        return table_html(rows, with_command=self._own_servers)

    @staticmethod
    def _state(rows: list[Row], num_loads: int, text: str) -> str:
        done = num_done(rows, num_loads // len(rows)) if rows else 0
        return progress_html(done, num_loads, f"{done} of {num_loads} loads measured: {text}")


def _command_html(flags: Sequence[str]) -> str:
    command = escape(f"octavo bench sweep {shlex.join(flags)}")
    return f'<p class="octavo-figures">The same in a terminal: <code>{command}</code></p>'
