"""The tab Plan: what a model takes of a device, what a workload needs, and the LLMDeployment to apply."""

from __future__ import annotations

import asyncio
import shlex
from html import escape
from typing import Any

import gradio as gr

from octavo.chat_client import KeyRequiredError
from octavo.dashboard.events import QUIET, Updates
from octavo.dashboard.plans import Planner, plan_html, plan_words
from octavo.dashboard.session import Session
from octavo.dashboard.visitors import check_model
from octavo.errors import OctavoError
from octavo.fetch.model_names import DEFAULT_MODEL
from octavo.plan.gpus import GPUS

# One plan at a time, the newest: a slider that is moved twice is planned for once.
_EVENTS: dict[str, Any] = {
    "api_visibility": "private",
    "show_progress": "minimal",
    "concurrency_limit": 1,
    "concurrency_id": "plan",
}


def build(session: Session) -> None:
    """Add the tab's components and events."""
    named = session.own_model or DEFAULT_MODEL
    planner = Planner()
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            model = gr.Textbox(named, label="Model", info="org/name on a hub, a folder, a file, config.json alone")
            with gr.Row():
                devices = [("this machine", ""), *((gpu.title, name) for name, gpu in GPUS.items())]
                gpu = gr.Dropdown(devices, value="", label="Device")
                gpus = gr.Dropdown([1, 2, 4, 8], value=1, label="GPUs that share it")
                memory = gr.Textbox(label="Memory", placeholder="all, or 24GiB")
            with gr.Row():
                max_model_len = gr.Textbox(label="max-model-len", placeholder="the model's")
                quantization = gr.Dropdown([("as stored", ""), "int8", "fp8"], value="", label="quantization")
                kv_dtype = gr.Dropdown([("auto", ""), "fp8", "int8"], value="", label="kv-cache-dtype")
            context = gr.Slider(64, 32768, 1024, step=64, label="Context: tokens of a prompt")
            output = gr.Slider(16, 8192, 256, step=16, label="Output: tokens of an answer")
            users = gr.Slider(1, 500, 20, step=1, label="Users at the same time")
            share = gr.Slider(0, 1, 0, step=0.05, label="Prefix share: of a prompt, the same for all")
            with gr.Row():
                ttft = gr.Textbox(label="Time to first token, at most", placeholder="any, or 500ms")
                itl = gr.Textbox(label="Between tokens, at most", placeholder="any, or 40ms")
            button = gr.Button("Plan", variant="primary")
        with gr.Column(scale=3):
            state = gr.HTML(_state("Planning..."))
            found = gr.HTML()
            command = gr.HTML()
            yaml = gr.Markdown(elem_id="plan-yaml")
            with gr.Accordion("In words, and how each figure comes about", open=False):
                text = gr.Markdown(elem_id="plan-text")

    fields = {
        "gpu": gpu,
        "gpus": gpus,
        "memory": memory,
        "max_model_len": max_model_len,
        "quantization": quantization,
        "kv_cache_dtype": kv_dtype,
        "context": context,
        "output": output,
        "users": users,
        "prefix_share": share,
        "ttft": ttft,
        "itl": itl,
    }

    async def show(key: str | None, model: str, *values: str | float) -> Updates:
        yield {state: _state("Planning...")}
        flags: dict[str, Any] = dict(zip(fields, values, strict=True))
        flags |= {"gpus": flags["gpus"] if flags["gpus"] > 1 else None, "prefix_share": flags["prefix_share"] or None}
        try:
            await asyncio.to_thread(_check_key, session, key)
            check_model(model or "", named, session.local)
            words = plan_words(model, **flags)
            planned = await planner.plan(words)
        except OctavoError as error:
            yield {state: _state(f"No plan: {error}"), found: "", command: "", yaml: "", text: ""}
            return
        line = escape(f"octavo plan {shlex.join(words)}")
        said = f'<p class="octavo-figures">The same in a terminal: <code>{line}</code></p>'
        yield {
            state: _state(""),
            found: plan_html(planned.said),
            command: said,
            yaml: _code("yaml", planned.yaml),
            text: _code("text", planned.text),
        }

    def is_open(before: bool, event: gr.SelectData) -> bool:
        return before or event.value == "Plan"

    opened = gr.State(False)  # once it was: the first plan is that of the fields as they are
    session.tabs.select(is_open, opened, opened, **QUIET)
    shown = [state, found, command, yaml, text]
    changes = [
        opened.change,
        button.click,
        *(box.submit for box in (model, memory, max_model_len, ttft, itl)),
        *(choice.input for choice in (gpu, gpus, quantization, kv_dtype)),
        *(slider.release for slider in (context, output, users, share)),
    ]
    gr.on(changes, show, [session.key, model, *fields.values()], shown, trigger_mode="always_last", **_EVENTS)


def _state(text: str) -> str:
    return f'<p role="status">{escape(text)}</p>' if text else ""


def _code(language: str, text: str) -> str:
    """Show code with a button that copies it. `gr.Code` is not used: its editor is a quarter of the page's first
    download."""
    return f"````{language}\n{text}\n````"


def _check_key(session: Session, key: str | None) -> None:
    """Plans read files of this machine: whoever may not use the server may not plan. Raises KeyRequiredError."""
    try:
        session.find_model(key)
    except KeyRequiredError:
        raise
    except OctavoError:  # no server, or not yet: plans need none
        return
