"""The page around the tabs: title, the server's state, the field for its API key."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from html import escape
from types import ModuleType
from typing import Any

import gradio as gr
from fastapi import FastAPI
from gradio.routes import App

from octavo.chat_client import KeyRequiredError, Model
from octavo.dashboard import block_map, chat, compare, configurations, figures, load, memory, pictures, plan
from octavo.dashboard.events import QUIET
from octavo.dashboard.session import Session
from octavo.errors import OctavoError

TABS: dict[str, ModuleType] = {
    "Chat": chat,
    "Compare": compare,
    "Load": load,
    "Configurations": configurations,
    "Memory": memory,
    "Plan": plan,
}

_LOOK_SECONDS = 3.0  # between looks at whether the server is there
_FONT, _MONO = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]  # of the system: none is loaded
_CSS = f"""{block_map.CSS}{figures.CSS}{pictures.CSS}"""
_CSS += """
.gradio-container { width: 100% !important; max-width: 76rem !important; margin: 0 auto !important; }
.octavo-title { display: flex; align-items: baseline; gap: 1rem; flex-wrap: wrap; }
.octavo-title h1 { margin: 0; font-size: 1.5rem; }
.octavo-state::before { content: ""; display: inline-block; width: .6em; height: .6em; border-radius: 50%;
  margin-right: .5em; background: #d97706; }
.octavo-state.ready::before { background: #16a34a; }
.octavo-state.failed::before { background: #dc2626; }
.octavo-side { display: flex; align-items: baseline; gap: .75rem; flex-wrap: wrap; }
.octavo-side h2 { margin: 0; font-size: 1.1rem; }
.octavo-badge { background: var(--background-fill-secondary); border: 1px solid var(--border-color-primary);
  border-radius: 1rem; padding: .1rem .7rem; font-size: .8rem; }
.octavo-verdict { font-size: 1.15rem; min-height: 1.7em; margin: .25rem 0; }
.octavo-figures { color: var(--neutral-500); font-size: .85rem; margin: 0; }
#chat button[aria-label="Clear"], #chat .message:has(.octavo-figures) + .message-buttons { display: none; }
.dark .octavo-figures { color: var(--neutral-400); }
"""


def make_app(session: Session) -> Any:
    """The page as an ASGI application."""
    theme = gr.themes.Default(primary_hue="blue", neutral_hue="slate", font=_FONT, font_mono=_MONO)
    with _without_drafts():
        page = _build(session)
    app = gr.mount_gradio_app(
        FastAPI(docs_url=None, redoc_url=None, openapi_url=None),
        page,
        "/",
        theme=theme,
        css=_CSS,
        footer_links=[],
        run_history=False,
        show_error=True,
        mcp_server=False,
        ssr_mode=False,
        pwa=False,
    )
    page.app = app.routes[-1].app  # its queue calls it
    page._queue.sleep_when_free = (
        0.01  # seconds between looks for events: Gradio's thousand a second take 3 % of a core
    )
    return app


@contextlib.contextmanager
def _without_drafts() -> Iterator[None]:
    """Gradio makes an application of all its routes when blocks are opened, when they are closed and when they are
    mounted. Only the last is served; the others take a fifth of the time until the page is there."""
    kind: Any = App
    create = kind.create_app
    kind.create_app = staticmethod(lambda *_, **__: None)
    try:
        yield
    finally:
        kind.create_app = staticmethod(create)


def _build(session: Session) -> Any:
    with gr.Blocks(title="Octavo", analytics_enabled=False) as page:
        session.key, session.model = gr.State(None), gr.State(None)
        title = gr.HTML(_title("Octavo", "", "connecting"), elem_id="octavo-title")
        kind = gr.State("")  # of what the title says: ready, failed, key; nothing while it starts
        with gr.Row(visible=False) as ask:
            key = gr.Textbox(
                label="API key", type="password", scale=4, info="The server answers only those who have it."
            )
            use = gr.Button("Use this key", scale=1)
        with gr.Tabs() as session.tabs:
            for name, module in TABS.items():
                with gr.Tab(name, id=name.lower()):
                    module.build(session)

        async def show_state(entered: str | None) -> AsyncIterator[dict[Any, Any]]:
            used = {key: ""} if entered else {}  # before the verdict on it: later it would clear the next one
            yield {title: _title("Octavo", "", "starting" if session.is_own else "connecting")} | used
            try:
                await session.started()
                model = session.find_model(entered)
            except KeyRequiredError as error:
                told = str(error) if entered else "an API key is needed"
                yield {title: _title("Octavo", "failed", told), ask: gr.Row(visible=True), kind: "key"}
            except OctavoError as error:
                yield {title: _title("Octavo", "failed", str(error)), kind: "failed"}
            else:
                yield {ask: gr.Row(visible=False), session.key: entered} | ready(model)

        def ready(model: Model) -> dict[Any, Any]:
            length = f", context of {model.max_model_len:,} tokens" if model.max_model_len else ""
            state = f"ready at {session.address}{length}"
            return {title: _title(model.name, "ready", state), kind: "ready", session.model: model}

        async def look(key: str | None, model: Model | None, was: str) -> Any:
            """True if the server is there as the title says; another one may be there by now."""
            if was not in ("ready", "failed"):
                return gr.skip()
            try:
                await session.look(key)
                return gr.skip() if was == "ready" else ready(await asyncio.to_thread(session.find_model, key))
            except OctavoError as error:
                name = model.name if model else "Octavo"
                return {title: _title(name, "failed", str(error)), kind: "failed"}

        # The key goes from the field into this visitor's state and nowhere else.
        changed = [title, ask, session.key, session.model, key, kind]
        page.load(show_state, session.key, changed, **QUIET)
        gr.on([use.click, key.submit], show_state, key, changed, **QUIET)
        shown = [title, kind, session.model]
        gr.Timer(_LOOK_SECONDS).tick(look, [session.key, session.model, kind], shown, **QUIET)
    return page


def _title(name: str, kind: str, state: str) -> str:
    return (
        f'<div class="octavo-title"><h1>{escape(name)}</h1>'
        f'<span class="octavo-state {kind}" role="status">{escape(state)}</span></div>'
    )
