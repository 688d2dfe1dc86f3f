"""The tab Configurations: one server after another, each with other flags, under the same loads."""

from __future__ import annotations

import shlex
from html import escape

import gradio as gr

from octavo.dashboard.session import Session
from octavo.dashboard.sweep_panel import SweepPanel
from octavo.dashboard.sweeps import load_words

_COMMON = [
    "enable_prefix_caching=on,off",
    "block_size=16,32",
    "max_num_seqs=8,64",
    "max_model_len=64,512",
    "quantization=none,int8",
]


def build(session: Session) -> None:
    """Add the tab's components and events."""
    command = escape(shlex.join(["octavo", "serve", *session.flags]))
    gr.HTML(
        f'<p class="octavo-figures">Every combination of these values is a server of its own, <code>{command}</code> '
        "with other flags. They are measured in turn, there and back (A B B A), since other programs move figures."
        "</p>"
    )
    with gr.Row():
        common = gr.CheckboxGroup(_COMMON, value=["max_num_seqs=8,64"], label="Flags and values to compare", scale=2)
        others = gr.Textbox(
            label="Others, one a line",
            lines=3,
            placeholder="max_num_batched_tokens=128,512",
            scale=1,
            info="name=value,value of any flag of octavo serve; on and off for switches, none for the default",
        )
    with gr.Row():
        users = gr.Textbox("1, 10", label="Users", info="at the same time")
        requests = gr.Number(3, label="Requests of each", minimum=1, precision=0)
        repeats = gr.Number(2, label="Repeats", minimum=1, precision=0, info="of each configuration")
        prompt = gr.Number(32, label="Prompt tokens", minimum=1, precision=0)
        answer = gr.Number(24, label="Answer tokens", minimum=1, precision=0)
    panel = SweepPanel(session, "octavo-configurations", own_servers=True)

    def words(
        common: list[str],
        others: str,
        users: str,
        requests: float | None,
        repeats: float | None,
        prompt: float | None,
        answer: float | None,
    ) -> list[str]:
        params = [*common, *("".join(line.split()) for line in (others or "").splitlines() if line.strip())]
        load = load_words(users, requests_per_user=requests, input_len=prompt, output_len=answer, repeats=repeats)
        return [*(f"--param={param}" for param in params), *load, *(["--", *session.flags] if session.flags else ())]

    panel.connect(words, [common, others, users, requests, repeats, prompt, answer])
