"""Messages of the Messages API as those of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from octavo.entrypoints.anthropic.protocol import (
    AssistantMessage,
    ImageBlockParam,
    InputMessage,
    SystemMessage,
    TextBlockParam,
    ThinkingBlockParam,
    ToolReferenceBlockParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
    UrlSourceParam,
    UserMessage,
)
from octavo.entrypoints.anthropic.tools import Tools
from octavo.entrypoints.sealing import Seal
from octavo.multimodal.items import ImagePart


def messages_of(given: Sequence[InputMessage], tools: Tools, seal: Seal) -> list[dict[str, Any]]:
    """The messages of a request, not checked yet. ``tools`` learn what messages say of them; ``seal`` opens thoughts.
    Raises APIError."""
    found: list[dict[str, Any]] = []
    last_user = max((at for at, message in enumerate(given) if isinstance(message, UserMessage)), default=-1)
    for at, message in enumerate(given):
        where = f"messages.{at}"
        if isinstance(message, AssistantMessage):
            found.append(_answer(message, seal))
        elif isinstance(message, UserMessage):
            found += _user(message, where, tools)
        else:
            found += _instructions(message, where, tools, at < last_user)
    return found or [{"role": "system", "content": ""}]  # as empty as what was sent


def _instructions(message: SystemMessage, where: str, tools: Tools, passed: bool) -> list[dict[str, Any]]:
    """``passed``: the user has said something since. Changes of tools last, other text may be only for a while."""
    parts = []
    for at, block in enumerate(message.content):
        if not isinstance(block, TextBlockParam):
            parts.append(tools.change(block, f"{where}.content.{at}"))
        elif not (passed and message.clear_at == "next_user_message"):
            parts.append(block.text)
    return [{"role": "system", "content": parts}] if parts else []


def _user(message: UserMessage, where: str, tools: Tools) -> list[dict[str, Any]]:
    """Return what the user says, and each tool's result as a message of its own."""
    found: list[dict[str, Any]] = []
    said: list[str | ImagePart] = []
    for at, block in enumerate(message.content):
        if isinstance(block, ToolResultBlockParam):
            if said:
                found.append({"role": "user", "content": _content(said)})
                said = []
            parts = _result(block, f"{where}.content.{at}", tools)
            found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(parts)})
        else:
            said.append(_part(block, f"{where}.content.{at}"))
    if said or not found:
        found.append({"role": "user", "content": _content(said)})
    return found


def _result(result: ToolResultBlockParam, where: str, tools: Tools) -> list[str | ImagePart]:
    parts: list[str | ImagePart] = []
    numbered = enumerate(result.content or [])
    for is_found, group in groupby(numbered, lambda pair: isinstance(pair[1], ToolReferenceBlockParam)):
        blocks = list(group)
        if is_found:
            parts.append(tools.found([block for _, block in blocks if isinstance(block, ToolReferenceBlockParam)]))
            continue
        for at, block in blocks:
            if not isinstance(block, ToolReferenceBlockParam):
                parts.append(_part(block, f"{where}.content.{at}"))
    return parts


def _part(block: TextBlockParam | ImageBlockParam, where: str) -> str | ImagePart:
    """A part of a chat. ``where`` is the block's field."""
    if not isinstance(block, ImageBlockParam):
        return block.text
    if isinstance(block.source, UrlSourceParam):
        return ImagePart(f"{where}.source.url", block.source.url)
    return ImagePart(f"{where}.source.data", block.source.data, is_base64=True)


def _content(parts: list[str | ImagePart]) -> str | list[str | ImagePart]:
    """A text, or with images parts."""
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def _answer(message: AssistantMessage, seal: Seal) -> dict[str, Any]:
    blocks = message.content
    texts = [block.text for block in blocks if isinstance(block, TextBlockParam)]
    answer: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    thoughts = [
        text
        for block in blocks
        if isinstance(block, ThinkingBlockParam) and (text := block.thinking or seal.open(block.signature))
    ]
    if thoughts:
        answer["reasoning_content"] = "\n".join(thoughts)
    if calls := [block for block in blocks if isinstance(block, ToolUseBlockParam)]:
        answer["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    return answer
