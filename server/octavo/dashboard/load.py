"""The tab Load: how fast the server is with so many users at once."""

from __future__ import annotations

import gradio as gr

from octavo.dashboard.session import Session
from octavo.dashboard.sweep_panel import SweepPanel
from octavo.dashboard.sweeps import load_words


def build(session: Session) -> None:
    """Add the tab's components and events."""
    with gr.Row():
        users = gr.Textbox("1, 5, 10, 20", label="Users", info="at the same time, one load after the other")
        requests = gr.Number(3, label="Requests of each", minimum=1, precision=0, info="one after the other")
        prompt = gr.Number(128, label="Prompt tokens", minimum=1, precision=0, info="random words")
        answer = gr.Number(64, label="Answer tokens", minimum=1, precision=0, info="whatever the model says")
    panel = SweepPanel(session, "octavo-load", own_servers=False)

    def words(users: str, requests: float | None, prompt: float | None, answer: float | None) -> list[str]:
        load = load_words(users, requests_per_user=requests, input_len=prompt, output_len=answer, repeats=1)
        return [f"--base-url={session.address}", *load]

    panel.connect(words, [users, requests, prompt, answer])
