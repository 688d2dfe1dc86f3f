"""The tab Compare: one prompt, `generate` of Hugging Face and the engine side by side."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import gradio as gr
import httpx

from octavo.bench.client import read_result
from octavo.bench.http_client import Exchange, HTTPClient
from octavo.bench.hugging_face import WARM_UP_TOKENS
from octavo.chat_client import Answer, Model
from octavo.dashboard.events import QUIET, Updates, restoring
from octavo.dashboard.hugging_face import REFRESH_SECONDS, HuggingFace
from octavo.dashboard.session import Session
from octavo.dashboard.visitors import check_model
from octavo.errors import OctavoError

_PROMPT = "Explain in simple words how a refrigerator keeps food cold."
_SAME = "the engine's"
_DTYPES = [_SAME, "float32", "bfloat16", "float16"]
_MOST_ROWS, _MOST_TOKENS = 32, 1024
_ENGINE, _HUGGING_FACE = "Octavo", "Hugging Face generate"


@dataclass(frozen=True)
class Figures:
    """Times of one side: seconds from the request to the first token and to the last of all rows."""

    tokens: int
    ttft: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole time, as `octavo bench throughput` counts."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return f"TTFT {1000 * self.ttft:,.0f} ms · {self.tokens_per_second:,.1f} tok/s · {self.tokens:,} tokens"


@dataclass(frozen=True)
class Work:
    """The task of both sides: a number of copies of a prompt at once, greedy."""

    prompt: str
    rows: int
    max_tokens: int
    ignore_eos: bool

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation."""
        return [{"role": "user", "content": self.prompt}]


def build(session: Session) -> None:
    """Add the tab's components and events."""
    gr.HTML(
        '<p class="octavo-figures">The engine answers first, then Hugging Face: neither slows the other. Both decode '
        "greedily. tok/s counts the tokens of the whole answer, the time to its first token included.</p>"
    )
    prompt = gr.Textbox(_PROMPT, label="Prompt", lines=2, max_lines=8)
    with gr.Row():
        max_tokens = gr.Slider(1, _MOST_TOKENS, 128, step=1, label="Output tokens", min_width=220)
        rows = gr.Slider(
            1, _MOST_ROWS, 1, step=1, label="Batch size", info="Copies of the prompt at once", min_width=220
        )
        dtype = gr.Dropdown(_DTYPES, value=_SAME, label="dtype of Hugging Face", min_width=180)
        ignore_eos = gr.Checkbox(
            True, label="Full length", info="Go on after the answer's end: equal work", min_width=180
        )
    name = gr.Textbox(
        label="Model for Hugging Face", info="A name or folder on this machine", visible=not session.is_own
    )
    with gr.Row():
        run = gr.Button("Compare", variant="primary")
        stop = gr.Button("Stop", interactive=False)
    verdict = gr.HTML(_verdict(None, None), elem_id="compare-verdict")
    with gr.Row():
        ours, theirs = _side(_ENGINE, "Answer of Octavo"), _side(_HUGGING_FACE, "Answer of Hugging Face")
    compare = _Compare(session, ours, theirs, verdict, run, stop)
    changed = [*ours.components, *theirs.components, verdict, run, stop]
    inputs = [session.key, session.model, prompt, max_tokens, rows, dtype, ignore_eos, name]
    run.click(compare.compare, inputs, changed, **QUIET)
    stop.click(compare.stop_it, None, stop, **QUIET)
    session.model.change(lambda model: model.name if model else "", session.model, name, **QUIET)


@dataclass(frozen=True)
class _Side:
    """The display of one side."""

    badge: Any
    figures: Any
    answer: Any

    @property
    def components(self) -> tuple[Any, Any, Any]:
        """All of them."""
        return self.badge, self.figures, self.answer


def _side(title: str, label: str) -> _Side:
    with gr.Column():
        badge, figures = gr.HTML(_badge(title, "")), gr.HTML(_figures(""))
        return _Side(badge, figures, gr.Textbox(label=label, lines=8, max_lines=12, interactive=False))


@dataclass
class _Compare:
    """The tab's events. One comparison at a time, or they would measure each other."""

    session: Session
    engine: _Side
    hf: _Side
    verdict: Any
    run: Any
    stop: Any
    process: HuggingFace = field(default_factory=HuggingFace)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)  # of the comparison under way
    busy: bool = False

    async def compare(
        self,
        key: str | None,
        model: Model | None,
        prompt: str,
        max_tokens: int,
        rows: int,
        dtype: str,
        ignore_eos: bool,
        name: str,
    ) -> Updates:
        problems = {
            "Write a prompt first.": not prompt.strip(),
            "Another comparison is running.": self.busy,
            "Name the model for Hugging Face first.": not self.session.is_own and not name.strip(),
        }
        if any(problems.values()):
            yield {self.verdict: _problem(next(text for text, there in problems.items() if there))}
            return
        try:
            check_model(name, self.session.own_model, self.session.local)
        except OctavoError as error:
            yield {self.verdict: _problem(str(error))}
            return
        work, self.stopped, self.busy = Work(prompt, int(rows), int(max_tokens), ignore_eos), asyncio.Event(), True
        flags = self.session.flags if self.session.is_own else [f"--model={name.strip()}"]
        both = self._both(key, model, work, flags, None if dtype == _SAME else dtype)
        try:
            yield self._cleared()
            async for update in restoring(both, lambda: self._buttons(busy=False)):
                yield update
        except OctavoError as error:
            told = "Stopped." if self.stopped.is_set() else str(error)
            yield {self.verdict: _problem(told)}
        finally:
            self.busy = False
        yield self._buttons(busy=False)

    async def stop_it(self) -> Any:
        self.stopped.set()
        await self.process.stop()
        return gr.Button(interactive=self.busy)

    def _cleared(self) -> dict[Any, Any]:
        return {
            self.engine.badge: _badge(_ENGINE, ""),
            self.engine.answer: "",
            self.engine.figures: _figures("starting"),
            self.hf.badge: _badge(_HUGGING_FACE, ""),
            self.hf.answer: "",
            self.hf.figures: _figures("waiting"),
            self.verdict: _verdict(None, None),
        } | self._buttons(busy=True)

    def _buttons(self, busy: bool) -> dict[Any, Any]:
        """Stop also frees the memory of Hugging Face's process after a comparison."""
        can_stop = busy or self.process.pid is not None
        return {self.run: gr.Button(interactive=not busy), self.stop: gr.Button(interactive=can_stop)}

    async def _both(
        self, key: str | None, model: Model | None, work: Work, flags: Sequence[str], dtype: str | None
    ) -> Updates:
        prompt = await self._token_ids(key, model, work)
        ours: Figures | None = None
        async for text, ours in self._engine(key, model, work):
            yield {self.engine.answer: text, self.engine.figures: _figures(str(ours or "answering"))}
        yield {self.hf.figures: _figures("loading the model in transformers")}
        ready = await self.process.start(flags, dtype)
        precision = ready["engine"] if self.session.is_own else "precision as its server was started with"
        yield {
            self.engine.badge: _badge(_ENGINE, f"{precision}, batch size {work.rows}"),
            self.hf.badge: _badge(_HUGGING_FACE, f"{ready['dtype']}, batch size {work.rows}, {ready['device']}"),
            self.hf.figures: _figures("answering"),
        }
        async for _ in self.process.generate([prompt], WARM_UP_TOKENS, ignore_eos=True):
            pass
        theirs: Figures | None = None
        async for message in self.process.generate([prompt] * work.rows, work.max_tokens, work.ignore_eos):
            if done := message.get("done"):
                theirs = Figures(done["tokens"], done["ttft"], done["seconds"])
            else:
                yield {self.hf.answer: message["text"]}
        yield {self.hf.figures: _figures(str(theirs)), self.verdict: _verdict(ours, theirs)}

    async def _engine(
        self, key: str | None, model: Model | None, work: Work
    ) -> AsyncGenerator[tuple[str, Figures | None], None]:
        """The first row's answer while it grows; at the end, with the figures of all rows. Measured by the client of
        `octavo bench serve`. Raises OctavoError."""
        headers = {"Authorization": f"Bearer {found}"} if (found := self.session.api_key(key)) else {}
        http = HTTPClient(self.session.address, headers)
        try:
            async for _ in self._rows(http, model, work, 1, WARM_UP_TOKENS):
                pass
            first = _Growing()
            async for exchanges in self._rows(http, model, work, work.rows, work.max_tokens):
                yield first.text(exchanges[0]), None
        finally:
            http.close()
        results = [read_result(exchange, 0, 0.0) for exchange in exchanges]
        for result in results:
            if not result.success:
                raise OctavoError(f"the server at {self.session.address}: {result.error}")
        yield (
            first.text(exchanges[0]),
            Figures(
                sum(result.output_tokens for result in results),
                sum(result.ttft for result in results) / work.rows,
                max(result.latency for result in results),
            ),
        )

    async def _rows(
        self, http: HTTPClient, model: Model | None, work: Work, rows: int, max_tokens: int
    ) -> AsyncGenerator[list[Exchange], None]:
        """Yield the rows of all answers, again and again while these grow. Raises OctavoError when it is stopped."""
        body = {
            "model": model.name if model else None,
            "messages": work.messages,
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": work.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        exchanges = [Exchange() for _ in range(rows)]
        # A salt each: no row finds another's prompt in the prefix cache, as none does at Hugging Face.
        asked = asyncio.gather(
            *(
                http.post("/v1/chat/completions", body | {"cache_salt": secrets.token_hex(8)}, exchange=exchange)
                for exchange in exchanges
            )
        )
        stopping = asyncio.create_task(self.stopped.wait())
        try:
            while not asked.done():
                await asyncio.wait((asked, stopping), timeout=REFRESH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if self.stopped.is_set():
                    raise OctavoError("stopped")
                yield exchanges
        finally:
            asked.cancel()
            stopping.cancel()

    async def _token_ids(self, key: str | None, model: Model | None, work: Work) -> list[int]:
        """The prompt as the server tokenizes it, so that both sides read the same. Raises OctavoError."""
        body = {"model": model.name if model else None, "messages": work.messages}
        try:
            async with self.session.async_client(key) as http:
                answer = await http.post(f"{self.session.address}/tokenize", json=body)
                if answer.status_code != 200:
                    raise OctavoError(f"the server answered {answer.status_code} to /tokenize")
                return [int(token) for token in answer.json()["tokens"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise OctavoError(f"the server does not tokenize: {error or type(error).__name__}") from None


class _Growing:
    """The text of an answer whose bytes come in pieces. What was read is not read again."""

    def __init__(self) -> None:
        self._num_pieces, self._rest, self._answer, self._text = 0, b"", Answer(), ""

    def text(self, exchange: Exchange) -> str:
        """The text until now, after its reasoning. Raises OctavoError if the server reports that it broke off."""
        pieces = exchange.pieces[self._num_pieces :] if exchange.status == 200 else []
        self._num_pieces += len(pieces)
        *lines, self._rest = (self._rest + b"".join(piece for _, piece in pieces)).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):  # `read_result` says it
                self._text += "".join(map("".join, self._answer.take(line.decode(), 0.0)))
        return self._text


def _badge(title: str, about: str) -> str:
    badge = f'<span class="octavo-badge">{escape(about)}</span>' if about else ""
    return f'<div class="octavo-side"><h2>{escape(title)}</h2>{badge}</div>'


def _figures(text: str) -> str:
    return f'<p class="octavo-figures" role="status">{escape(text)}</p>'


def _problem(text: str) -> str:
    return f'<p class="octavo-verdict" role="alert">{escape(text)}</p>'


def _verdict(ours: Figures | None, theirs: Figures | None) -> str:
    if ours is None or theirs is None or not theirs.tokens_per_second or not ours.ttft:
        return '<p class="octavo-verdict"></p>'
    ratio, sooner = ours.tokens_per_second / theirs.tokens_per_second, theirs.ttft / ours.ttft
    return (
        f'<p class="octavo-verdict" role="status">Octavo / Hugging Face: <strong>{ratio:.2f}x</strong> tok/s, '
        f"first token <strong>{sooner:.1f}x</strong> as soon</p>"
    )
