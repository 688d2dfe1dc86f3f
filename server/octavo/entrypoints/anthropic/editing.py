"""Edits of long conversations: old results of tools, and reasoning of earlier turns, are cleared before the model reads
them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.entrypoints.anthropic.protocol import (
    AssistantMessage,
    ClearToolUses,
    InputMessage,
    TextBlockParam,
    ToolReferenceBlockParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
    UserMessage,
)
from octavo.text.messages import REASONING

CLEARED = "[This result was cleared to save room. Call the tool again if it is needed.]"
TRIGGER, KEEP = 100_000, 3  # Anthropic's defaults: tokens of the prompt, and calls whose results stay


@dataclass(frozen=True)
class Cleared:
    """Messages without old results, and the texts that are gone, one a call."""

    messages: list[InputMessage]
    texts: list[str]


def num_tool_uses(messages: Sequence[InputMessage]) -> int:
    """Count the calls of a conversation."""
    return len(_calls(messages))


def clear_tool_uses(messages: Sequence[InputMessage], edit: ClearToolUses) -> Cleared:
    """Clear the results of all calls but the last ones, of tools that ``edit`` does not exclude, and where it says so
    their arguments, too. A result that names tools which a search has found stays: they would be gone."""
    keep = KEEP if edit.keep is None else edit.keep.value
    excluded = set(edit.exclude_tools or ())
    old = _calls(messages)
    clearing = {call.id: call for call in old[: max(0, len(old) - keep)] if call.name not in excluded}
    found: dict[str, str] = {}
    done: list[InputMessage] = []
    for message in messages:
        if isinstance(message, UserMessage):
            message = message.model_copy(
                update={"content": [_without_result(block, clearing, found) for block in message.content]}
            )
        done.append(message)
    if edit.clear_tool_inputs:
        done = [_without_inputs(message, found, edit.clear_tool_inputs) for message in done]
    return Cleared(done, list(found.values()))


def num_thinking_turns(messages: Sequence[Mapping[str, Any]]) -> int:
    """Count the turns of a checked conversation that have reasoning; each begins with a user's message."""
    return sum(map(bool, _thoughts(messages)))


def earlier_thoughts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the reasoning of each turn before the user's last message that has some."""
    return [thoughts for thoughts in _thoughts(messages)[:-1] if thoughts]


def _thoughts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    turns = [""]
    for message in messages:
        if message["role"] == "user":
            turns.append("")
        turns[-1] += next((message[name] for name in REASONING if message.get(name)), "")
    return turns


def _calls(messages: Sequence[InputMessage]) -> list[ToolUseBlockParam]:
    return [
        block
        for message in messages
        if isinstance(message, AssistantMessage)
        for block in message.content
        if isinstance(block, ToolUseBlockParam)
    ]


def _without_result(block: Any, clearing: Collection[str], found: dict[str, str]) -> Any:
    if not isinstance(block, ToolResultBlockParam) or block.tool_use_id not in clearing:
        return block
    parts = block.content or []
    texts = [part.text for part in parts if isinstance(part, TextBlockParam)]
    if any(isinstance(part, ToolReferenceBlockParam) for part in parts) or texts == [CLEARED]:
        return block
    found[block.tool_use_id] = "".join(texts)
    return block.model_copy(update={"content": [TextBlockParam(type="text", text=CLEARED)]})


def _without_inputs(message: InputMessage, found: Collection[str], names: bool | list[str]) -> InputMessage:
    if not isinstance(message, AssistantMessage):
        return message

    def cleared(block: Any) -> Any:
        if not isinstance(block, ToolUseBlockParam) or block.id not in found:
            return block
        return block.model_copy(update={"input": {}}) if names is True or block.name in names else block  # type: ignore[operator]

    return message.model_copy(update={"content": [cleared(block) for block in message.content]})
