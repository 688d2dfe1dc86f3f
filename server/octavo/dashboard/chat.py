"""The tab Chat: a conversation with the served model."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from html import escape
from typing import Any

import gradio as gr

from octavo.chat_client import CHAT_SAMPLING, SERVER_SAMPLING, Model
from octavo.dashboard.answers import Reply, replies
from octavo.dashboard.events import QUIET, Updates, errors_shown, restoring
from octavo.dashboard.pictures import EMPTY, Picture, content_of, pictures_of, shown, tray
from octavo.dashboard.session import Session

_SHARE = 4  # an answer takes at most 1/4 of the context unless told otherwise: small models may never stop
_DEFAULT_MAX_TOKENS, _LONGEST = 512, 32_768  # where the server does not say how long its context is


@dataclass
class Turn:
    """A question and what came of it."""

    question: str
    pictures: list[Picture] = field(default_factory=list)
    reply: Reply = field(default_factory=Reply)
    forgotten: int = 0  # turns before it that the model has not seen: the context is full

    @property
    def is_refused(self) -> bool:
        """Return whether the server refused the turn. Later requests leave such a turn out."""
        return bool(self.reply.error) and not self.reply.answer.text

    def about(self) -> str:
        """Return the line below the answer."""
        if self.reply.error:
            return self.reply.error
        forgotten = f" · the context is full: without the oldest {self.forgotten}" if self.forgotten else ""
        return self.reply.figures() + forgotten if self.reply.done else ""


def build(session: Session) -> None:
    """Add the tab's components and events."""
    with gr.Row():
        with gr.Column(scale=3, min_width=480, elem_id="chat-area"):
            chatbot = gr.Chatbot(
                label="Conversation",
                height="60vh",
                layout="panel",
                buttons=["copy"],
                allow_tags=False,
                show_label=False,
                placeholder="Ask the model something.",
                elem_id="chat",
            )
            with gr.Row(equal_height=True):
                message = gr.Textbox(
                    label="Message",
                    placeholder="Enter sends, Shift+Enter begins a new line",
                    lines=1,
                    max_lines=8,
                    scale=6,
                    min_width=240,
                    autofocus=True,
                )
                send = gr.Button("Send", variant="primary", scale=1, min_width=96)
            pictures = tray()
            with gr.Row():
                stop = gr.Button("Stop", interactive=False, size="sm", min_width=96)
                retry = gr.Button("Retry", interactive=False, size="sm", min_width=96)
                clear = gr.Button("Clear", interactive=False, size="sm", min_width=96)
        with gr.Column(scale=1, min_width=240):
            system = gr.Textbox(label="System prompt", lines=3, placeholder="The chat template's own")
            temperature = gr.Slider(0, 2, SERVER_SAMPLING["temperature"], step=0.05, label="temperature")
            top_p = gr.Slider(0.01, 1, SERVER_SAMPLING["top_p"], step=0.01, label="top_p")
            max_tokens = gr.Slider(1, _LONGEST, _DEFAULT_MAX_TOKENS, step=1, label="max_tokens")
            gr.HTML('<p class="octavo-figures">They begin as the model\'s own files recommend.</p>')
    turns = gr.State([])
    settings = [system, temperature, top_p, max_tokens]
    chat = _Chat(session, chatbot, message, pictures, turns, _Buttons(send, stop, retry, clear))
    changed = [chatbot, message, pictures, turns, send, stop, retry, clear]
    inputs = [session.key, session.model, *settings]
    gr.on([message.submit, send.click], chat.send, [message, pictures, turns, *inputs], changed, **QUIET)
    retry.click(chat.retry, [turns, *inputs], changed, **QUIET)
    stop.click(chat.stop, None, None, **QUIET)
    clear.click(chat.clear, None, changed, **QUIET)
    session.model.change(_initial_settings, session.model, [*settings[1:], pictures], **QUIET)


@dataclass(frozen=True)
class _Buttons:
    send: gr.Button
    stop: gr.Button
    retry: gr.Button
    clear: gr.Button

    def update(self, busy: bool, any_turn: bool) -> dict[Any, Any]:
        """Enable the buttons that can be pressed now."""
        idle = gr.Button(interactive=any_turn and not busy)
        return {
            self.send: gr.Button(interactive=not busy),
            self.stop: gr.Button(interactive=busy),
            self.retry: idle,
            self.clear: idle,
        }


@dataclass(frozen=True)
class _Chat:
    """The tab's events."""

    session: Session
    chatbot: gr.Chatbot
    message: gr.Textbox
    pictures: gr.HTML
    turns: gr.State
    buttons: _Buttons
    stops: dict[str, asyncio.Event] = field(default_factory=dict)  # of answers under way, by Gradio's visitor's name

    async def send(self, request: gr.Request, message: str, tray: Any, turns: list[Turn], *rest: Any) -> Updates:
        with errors_shown():
            pictures = pictures_of(tray)
        if message.strip() or pictures:
            yield {self.message: "", self.pictures: EMPTY}
            answer = self._answer(request, Turn(message, pictures), turns, *rest)
            async for update in restoring(answer, lambda: self.buttons.update(busy=False, any_turn=bool(turns))):
                yield update

    async def retry(self, request: gr.Request, turns: list[Turn], *rest: Any) -> Updates:
        if turns:
            answer = self._answer(request, Turn(turns[-1].question, turns[-1].pictures), turns[:-1], *rest)
            async for update in restoring(answer, lambda: self.buttons.update(busy=False, any_turn=True)):
                yield update

    def stop(self, request: gr.Request) -> None:
        if (event := self.stops.get(request.session_hash or "")) is not None:
            event.set()

    def clear(self) -> dict[Any, Any]:
        emptied = {self.chatbot: [], self.turns: [], self.message: "", self.pictures: EMPTY}
        return emptied | self.buttons.update(busy=False, any_turn=False)

    async def _answer(
        self,
        request: gr.Request,
        turn: Turn,
        turns: list[Turn],
        key: str | None,
        model: Model | None,
        system: str,
        temperature: float,
        top_p: float,
        max_tokens: int,
    ) -> Updates:
        visitor, stop = request.session_hash or "", asyncio.Event()
        self.stops[visitor] = stop
        before = _messages(turns)
        turns = [*turns, turn]
        yield {self.chatbot: [*before, *_messages([turn])]} | self.buttons.update(busy=True, any_turn=True)
        body = {
            "model": model.name if model else None,
            "messages": _conversation(system, turns),
            **_defaults(model, temperature),
            "temperature": temperature,
            "top_p": top_p,
            "max_tokens": int(max_tokens),
        }
        try:
            again = True
            while again:
                body["messages"] = _conversation(system, turns[turn.forgotten :])
                async for turn.reply in replies(self.session, key, body, stop):
                    again = turn.reply.too_long and turn.forgotten < len(turns) - 1
                    if not again:
                        yield {self.chatbot: [*before, *_messages([turn])]}
                if again:
                    turn.forgotten += 1
        finally:
            self.stops.pop(visitor, None)
        yield {self.turns: turns} | self.buttons.update(busy=False, any_turn=True)


def _defaults(model: Model | None, temperature: float) -> dict[str, float]:
    """Return parameters without a slider: chat's where the model recommends none, and the penalty that belongs to the
    model's own temperature."""
    said = model.sampling if model is not None else None
    if said == {}:
        return CHAT_SAMPLING
    if not said or "frequency_penalty" not in said or temperature != said.get("temperature"):
        return {}
    return {"frequency_penalty": said["frequency_penalty"]}


def _conversation(system: str, turns: list[Turn]) -> list[dict[str, Any]]:
    """Return the messages for the model: turns with an answer, and the last one."""
    said: list[dict[str, Any]] = [{"role": "system", "content": system}] if system.strip() else []
    for turn in turns:
        if turn.is_refused and turn is not turns[-1]:
            continue
        said.append({"role": "user", "content": content_of(turn.question, turn.pictures)})
        if turn.reply.answer.text:
            said.append({"role": "assistant", "content": turn.reply.answer.text})
    return said


def _messages(turns: list[Turn]) -> list[dict[str, Any]]:
    """Return the messages to display."""
    found: list[dict[str, Any]] = []
    for turn in turns:
        reply = turn.reply
        found.append({"role": "user", "content": shown(turn.question, turn.pictures)})
        if reply.thought:
            thinking = not reply.done and not reply.answer.text
            found.append(
                {
                    "role": "assistant",
                    "content": reply.thought,
                    "metadata": {"title": "Thinking", "status": "pending" if thinking else "done"},
                }
            )
        if reply.answer.text or not reply.done:
            found.append({"role": "assistant", "content": reply.answer.text or "…"})
        if told := turn.about():
            found.append({"role": "assistant", "content": f'<small class="octavo-figures">{escape(told)}</small>'})
    return found


def _initial_settings(model: Model | None) -> tuple[gr.Slider, gr.Slider, gr.Slider, gr.HTML]:
    """Sliders for temperature, top_p and max_tokens: what the model's files recommend; the tray of pictures, for
    models that read them."""
    sampling = SERVER_SAMPLING | (model.chat_sampling if model else {})
    longest = (model.max_model_len if model else None) or _LONGEST
    tokens = sampling.get("max_tokens") or (longest // _SHARE if longest < _LONGEST else _DEFAULT_MAX_TOKENS)
    return (
        gr.Slider(value=sampling["temperature"]),
        gr.Slider(value=sampling["top_p"]),
        gr.Slider(maximum=longest, value=min(tokens, longest)),
        gr.HTML(visible=bool(model is not None and model.reads_images)),
    )
