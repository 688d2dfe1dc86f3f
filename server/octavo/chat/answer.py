"""Generated text split into reasoning, content and tool calls, whole or piece by piece. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.chat.reasoning import ReasoningParser
from octavo.chat.spelled import SpelledMarkers, joined
from octavo.chat.thought_tokens import ThoughtTokens
from octavo.chat.tools.parsers import Piece, Reasoning, ToolParser
from octavo.chat.tools.plan import ToolPlan
from octavo.interface.outputs import CompletionOutput


@dataclass
class CallDelta:
    """New text of the ``index``-th tool call: id and name come with its first piece."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


# Told of an answer that is complete: its format, or "json" as a grammar made it; how many calls it has; how many texts
# began as a call and are content; how many of the calls have a name that no tool has.
CountCalls = Callable[[str, int, int, int], None]


@dataclass
class AnswerDelta:
    """The addition that new text makes to an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


@dataclass(frozen=True)
class Reading:
    """Says how an answer is read."""

    shows_reasoning: bool = True
    splits: bool = True  # False: thoughts that stand among calls stay in the content
    count: CountCalls | None = None
    spelled: SpelledMarkers | None = None  # breaks up what only looks like a marker
    thoughts: ThoughtTokens | None = None  # of an answer that may have some


class AnswerParser:
    """Splits the text of one answer as it comes: ``reasoning`` first, then ``tools`` what is left."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        plan: ToolPlan | None,
        reading: Reading | None = None,
    ) -> None:
        self._reading = reading or Reading()
        self._reasoning = reasoning
        self._plan = plan
        self._tools = tools
        self._new_thoughts = ""

    @property
    def num_thinking_tokens(self) -> int:
        """The number of tokens of the thoughts so far, shown or not."""
        goes_on = self._reasoning is not None and self._reasoning.is_thinking
        return 0 if self._reading.thoughts is None else self._reading.thoughts.total(goes_on)

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's finish reason, where ``reason`` is the engine's."""
        is_call = self._tools is not None and self._tools.num_calls > 0 and not self._tools.ends_inside_call
        return "tool_calls" if reason == "stop" and is_call else reason

    def feed(self, completion: CompletionOutput) -> AnswerDelta:
        """Return what the new text of ``completion`` adds."""
        spelled, thoughts = self._reading.spelled, self._reading.thoughts
        self._new_thoughts = ""
        text = completion.text if spelled is None else spelled.broken(completion.text, completion.token_ids)
        delta = self._read(text, completion)
        if thoughts is not None:
            thoughts.take(completion.token_ids, self._new_thoughts)
        if spelled is None:
            return delta
        delta.reasoning, delta.content = joined(delta.reasoning), joined(delta.content)
        for call in delta.calls:
            call.arguments = joined(call.arguments)
            call.name = call.name and joined(call.name)
        return delta

    def _read(self, text: str, completion: CompletionOutput) -> AnswerDelta:
        finished, delta = completion.finished, AnswerDelta()
        stopped = isinstance(completion.stop_reason, str)  # by a stop string of the client
        cut = completion.finish_reason == "length" or stopped
        if self._reasoning is not None:
            delta.reasoning, text = self._reasoning.feed(text)
            if finished:
                reasoning, rest = self._reasoning.finish(cut)
                delta.reasoning, text = delta.reasoning + reasoning, text + rest
            self._new_thoughts = delta.reasoning
            if not self._reading.shows_reasoning:
                delta.reasoning = ""
        if self._tools is None:
            delta.content = text
            return delta
        pieces = self._tools.feed(text) if text else []
        if finished:
            pieces += self._tools.finish(cut)
        for piece in pieces:
            self._add(delta, piece)
        if finished and self._plan is not None and self._reading.count is not None:
            name, tools = self._plan.name, self._tools
            self._reading.count(name, tools.num_calls, tools.num_malformed, tools.num_unknown)
        return delta

    def _add(self, delta: AnswerDelta, piece: Piece) -> None:
        if isinstance(piece, str):
            delta.content += piece
            return
        if isinstance(piece, Reasoning) and not self._reading.splits:
            delta.content += piece.text
            return
        if isinstance(piece, Reasoning):
            self._new_thoughts += piece.text
            delta.reasoning += piece.text if self._reading.shows_reasoning else ""
            return
        assert self._plan is not None
        if self._plan.max_calls is None or piece.index < self._plan.max_calls:
            call_id = None if piece.name is None else piece.id or self._plan.new_id(piece.index)
            delta.calls.append(CallDelta(piece.index, piece.arguments, call_id, piece.name))

    def parse(self, completion: CompletionOutput) -> AnswerDelta:
        """The whole answer at once: one delta a call."""
        answer = self.feed(completion)
        calls: list[CallDelta] = []
        for call in answer.calls:
            if call.id is not None:
                calls.append(call)
            else:
                calls[-1].arguments += call.arguments
        answer.calls = calls
        return answer


def message_of(answer: AnswerDelta) -> dict[str, Any]:
    """A whole answer as a message of OpenAI's API, which can be sent back."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return message
