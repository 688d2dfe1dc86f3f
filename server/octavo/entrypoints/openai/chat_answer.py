"""A model's text as the parts of a chat answer: thoughts, content and tool calls, whole or piece by piece. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from octavo.entrypoints.generation.reasoning import ReasoningParser
from octavo.entrypoints.generation.tools.parsers import Piece
from octavo.entrypoints.generation.tools.plan import ToolPlan
from octavo.entrypoints.openai.responses import ChatDelta, ChatMessage, FunctionCall, ToolCall, ToolCallDelta
from octavo.interface.outputs import CompletionOutput


@dataclass
class Parts:
    """What new text brought."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)

    def delta(self) -> ChatDelta | None:
        """None when there is nothing to tell."""
        if not (self.reasoning or self.content or self.calls):
            return None
        return ChatDelta(
            content=self.content or UNSET, tool_calls=self.calls or UNSET, reasoning_content=self.reasoning or UNSET
        )


class AnswerParser:
    """Takes the text of one answer apart as it comes."""

    def __init__(self, reasoning: ReasoningParser | None, plan: ToolPlan | None, show_reasoning: bool = True) -> None:
        self._reasoning = reasoning
        self._show_reasoning = show_reasoning
        self._plan = plan
        self._tools = plan.new_parser() if plan is not None else None

    def finish_reason(self, reason: str | None) -> str | None:
        is_call = self._tools is not None and self._tools.num_calls > 0 and not self._tools.ends_inside_call
        return "tool_calls" if reason == "stop" and is_call else reason

    def take(self, completion: CompletionOutput) -> Parts:
        """The parts of ``completion``'s text, which is new."""
        text, finished = completion.text, completion.finished
        parts = Parts()
        if self._reasoning is not None:
            parts.reasoning, text = self._reasoning.feed(text)
            if finished:
                thoughts, rest = self._reasoning.finish()
                parts.reasoning, text = parts.reasoning + thoughts, text + rest
            if not self._show_reasoning:
                parts.reasoning = ""
        if self._tools is None:
            parts.content = text
            return parts
        pieces = self._tools.feed(text) if text else []
        if finished:
            stopped = isinstance(completion.stop_reason, str)  # by one of the client's strings
            pieces += self._tools.finish(cut=completion.finish_reason == "length" or stopped)
        for piece in pieces:
            self._add(parts, piece)
        return parts

    def _add(self, parts: Parts, piece: Piece) -> None:
        assert self._plan is not None
        if isinstance(piece, str):
            parts.content += piece
            return
        if self._plan.max_calls is not None and piece.index >= self._plan.max_calls:
            return
        if piece.name is None:
            parts.calls.append(ToolCallDelta(piece.index, FunctionCall(UNSET, piece.arguments)))
        else:
            function = FunctionCall(piece.name, piece.arguments)
            parts.calls.append(ToolCallDelta(piece.index, function, self._plan.new_id(), "function"))

    def message(self, completion: CompletionOutput, role: str, echo: str) -> ChatMessage:
        """The whole answer at once."""
        parts = self.take(completion)
        calls: list[ToolCall] = []
        for piece in parts.calls:
            if piece.id is not UNSET:
                calls.append(ToolCall(piece.id, piece.function))
            else:
                calls[-1].function.arguments += piece.function.arguments
        content = echo + parts.content
        return ChatMessage(
            content if content or not calls else None,
            role,
            tool_calls=calls or UNSET,
            reasoning_content=_or_unset(parts.reasoning),
        )


def _or_unset(text: str) -> str | UnsetType:
    return text or UNSET
