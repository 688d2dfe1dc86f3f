"""Lines of streamed answers."""

from __future__ import annotations

from functools import partial

from msgspec import UNSET, Struct

from octavo.chat.answer import CallDelta
from octavo.entrypoints.errors import APIError, in_ollama_form
from octavo.entrypoints.ollama.answers import Totals, answer_of, logprobs_of, timestamp, whole_calls
from octavo.entrypoints.ollama.prepare import PreparedAnswer
from octavo.entrypoints.transport.responses import encode_json
from octavo.entrypoints.transport.template import Template
from octavo.interface.outputs import RequestOutput


class AnswerLines:
    """The lines of a streamed answer. Calls come whole, in one line before the last."""

    def __init__(self, prepared: PreparedAnswer) -> None:
        self._prepared = prepared
        self._parser = prepared.new_parser()
        self._calls: list[CallDelta] = []
        self._totals = Totals()
        only_text = prepared.rendered.is_plain and not prepared.body.logprobs
        self._template = Template(partial(_text_line, prepared), holes=2) if only_text else None

    def write(self, item: tuple[int, RequestOutput]) -> bytes:
        """The line of one output; empty if all of its text is held back."""
        _, output = item
        (completion,) = output.outputs
        self._totals.add(output, completion)
        if self._template is not None and completion.finish_reason is None:
            return self._template.fill(timestamp(), completion.text) if completion.text else b""
        delta = self._parser.feed(completion)
        self._calls += delta.calls
        calls = whole_calls(self._calls) if completion.finished else []
        logprobs = logprobs_of(self._prepared, completion)
        if not (delta.content or delta.reasoning or calls or logprobs is not UNSET):
            return b""
        return _line(answer_of(self._prepared, delta.content, delta.reasoning, calls, logprobs))

    def end(self) -> bytes:
        """The line with counts and durations."""
        return _line(answer_of(self._prepared, "", **self._totals.fields(self._prepared)))

    def error(self, error: APIError) -> bytes:
        """A line with the error."""
        return _line(in_ollama_form(error))


def _text_line(prepared: PreparedAnswer, created_at: str, text: str) -> bytes:
    return _line(answer_of(prepared, text, created_at=created_at))


def _line(answer: Struct) -> bytes:
    return encode_json(answer) + b"\n"
