"""Events of streamed responses. They are dicts: most of their fields differ from one type to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from octavo.chat.parts import Part, Step
from octavo.entrypoints.errors import APIError
from octavo.entrypoints.generation.logprobs import ChatLogprob
from octavo.entrypoints.responses.answers import Answer, ItemWriter
from octavo.entrypoints.responses.items import (
    CustomCallItem,
    FunctionCallItem,
    OutputItem,
    OutputMessage,
    ReasoningItem,
    ResponseFailure,
    ResponseObject,
    ToolSearchItem,
)
from octavo.entrypoints.responses.prepare import PreparedResponse
from octavo.entrypoints.transport.sse import EventTemplate, named_event
from octavo.interface.outputs import RequestOutput

Event = dict[str, Any]
_TEXT, _REASONING = "response.output_text", "response.reasoning_text"
_SUMMARY = "response.reasoning_summary"


class ItemEvents:
    """Makes the events of the items that ``items`` makes."""

    def __init__(self, items: ItemWriter) -> None:
        self._items = items

    def of_step(self, step: Step, cut: bool = False) -> list[Event]:
        """The events of one step, without their numbers. ``cut``: the part that closes is not whole."""
        action, part, text = step
        where = {"item_id": self._items.id_of(part), "output_index": part.index}
        if action == "add":
            return self._deltas(part, where, text, self._items.take_text(part, text))
        if action == "open":
            item = self._items.item(replace(part, pieces=[]), "in_progress")  # clients add the deltas to it
            events: list[Event] = [{"type": "response.output_item.added", "output_index": part.index, "item": item}]
            if isinstance(item, OutputMessage | ReasoningItem):
                events += _content_events("added", item, where)
                item.content = []
            if isinstance(item, ReasoningItem):
                item.summary = []
            return events
        item = self._items.item(part, "incomplete" if cut else "completed")
        done: Event = {"type": "response.output_item.done", "output_index": part.index, "item": item}
        return [*self._done(item, where), done]

    def text_template(self, part: Part) -> EventTemplate:
        """The event of new text of a part, without its number, for texts without log-probabilities."""
        where = {"item_id": self._items.id_of(part), "output_index": part.index}
        return EventTemplate(lambda text: self._deltas(part, where, text, [])[0], f"{_TEXT}.delta")

    def _deltas(self, part: Part, where: dict[str, Any], text: str, logprobs: list[ChatLogprob]) -> list[Event]:
        if part.kind == "text":
            return [{"type": f"{_TEXT}.delta", **where, "content_index": 0, "delta": text, "logprobs": logprobs}]
        if part.kind == "reasoning":
            if self._items.summarized:
                return [{"type": f"{_SUMMARY}_text.delta", **where, "summary_index": 0, "delta": text}]
            return [{"type": f"{_REASONING}.delta", **where, "content_index": 0, "delta": text}]
        tool = self._items.tool(part)
        if tool.custom or tool.searches:  # which come whole
            return []
        return [{"type": "response.function_call_arguments.delta", **where, "delta": text}]

    def _done(self, item: OutputItem, where: dict[str, Any]) -> list[Event]:
        """Make the events that end the content of an item."""
        if isinstance(item, FunctionCallItem):
            return [{"type": "response.function_call_arguments.done", **where, "arguments": item.arguments}]
        if isinstance(item, CustomCallItem):
            kind = "response.custom_tool_call_input"
            delta: list[Event] = [{"type": f"{kind}.delta", **where, "delta": item.input}] if item.input else []
            return [*delta, {"type": f"{kind}.done", **where, "input": item.input}]
        if isinstance(item, ToolSearchItem):
            return []
        ended: Event
        if isinstance(item, OutputMessage):
            (content,) = item.content
            said = {"text": content.text, "logprobs": content.logprobs}
            ended = {"type": f"{_TEXT}.done", **where, "content_index": 0, **said}
        elif item.summary:
            ended = {"type": f"{_SUMMARY}_text.done", **where, "summary_index": 0, "text": item.summary[0].text}
        else:
            ended = {"type": f"{_REASONING}.done", **where, "content_index": 0, "text": item.content[0].text}
        return [ended, *_content_events("done", item, where)]


def _content_events(action: str, item: OutputMessage | ReasoningItem, where: dict[str, Any]) -> list[Event]:
    """The event of the one part of an item, which is added or done."""
    if isinstance(item, ReasoningItem) and item.summary:
        part = item.summary[0]
        return [{"type": f"{_SUMMARY}_part.{action}", **where, "summary_index": 0, "part": part}]
    return [{"type": f"response.content_part.{action}", **where, "content_index": 0, "part": item.content[0]}]


class ResponseEvents:
    """The events of a streamed answer. ``begin``: those before its first item; ``number``: of its first event."""

    def __init__(
        self,
        prepared: PreparedResponse,
        begin: Sequence[str] = ("response.created", "response.in_progress"),
        number: int = 0,
    ) -> None:
        self._answer = Answer(prepared)
        self._item_events = ItemEvents(self._answer.items)
        self._num_tokens = 0
        self._last: RequestOutput | None = None
        self._begin, self._number = begin, number
        self._only_text = prepared.rendered.is_plain and prepared.body.num_logprobs is None
        self._text: tuple[Part, EventTemplate] | None = None  # once it has begun, where there is nothing else

    def write(self, item: tuple[int, RequestOutput]) -> bytes:
        """The events of one output; empty if all of its text is held back."""
        _, output = item
        (completion,) = output.outputs
        answer = self._answer
        self._num_tokens += len(completion.token_ids)
        if self._text is not None and completion.finish_reason is None:
            self._last = output
            return self._write_text(*self._text, completion.text) if completion.text else b""
        events: list[Event] = []
        if self._last is None:
            events += self._snapshots(*self._begin)
        self._last = output
        answer.note_logprobs(completion)
        for step in answer.splitter.feed(answer.parser.feed(completion)):
            events += self._item_events.of_step(step)
            if self._only_text and self._text is None and step[0] == "open":
                self._text = step[1], self._item_events.text_template(step[1])
        if completion.finish_reason is not None:
            for step in answer.splitter.finish():
                events += self._item_events.of_step(step, cut=completion.finish_reason == "length")
        return b"".join(map(self._write, events))

    async def end(self) -> bytes:
        """The whole response, once it is stored."""
        self.complete()
        await self._answer.keep()
        return self.last()

    def complete(self) -> Answer:
        """The answer, complete."""
        assert self._last is not None
        (completion,) = self._last.outputs
        self._answer.end(self._last, self._num_tokens, completion.finish_reason)
        return self._answer

    def last(self) -> bytes:
        """The event of the complete answer."""
        return self.told(f"response.{self._answer.response.status}")

    def told(self, *kinds: str) -> bytes:
        """Events of these kinds that show the response as it is."""
        return b"".join(map(self._write, self._snapshots(*kinds)))

    @property
    def number(self) -> int:
        """The number of the next event."""
        return self._number

    @property
    def response(self) -> ResponseObject:
        """The response as it is."""
        return self._answer.response

    def error(self, error: APIError) -> bytes:
        """The failed response, which is the last event."""
        response, begun = self._answer.response, b""
        if self._last is None:  # the stream's head has gone ahead
            begun = self.told(*self._begin)
        response.status, response.error = "failed", ResponseFailure(error.detail.message)
        return begun + self.told("response.failed")

    def _snapshots(self, *kinds: str) -> list[Event]:
        return [{"type": kind, "response": self._answer.response} for kind in kinds]

    def _write_text(self, part: Part, template: EventTemplate, text: str) -> bytes:
        part.pieces.append(text)
        self._number += 1
        return b'%b,"sequence_number":%d}\n\n' % (template.fill(text).removesuffix(b"}\n\n"), self._number - 1)

    def _write(self, event: Event) -> bytes:
        written = named_event(event["type"], {**event, "sequence_number": self._number})
        self._number += 1
        return written
