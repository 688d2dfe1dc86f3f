"""System messages for chat templates that take them at the beginning alone, or not at all. Pure.

Agents send instructions in the middle of a conversation (Claude Code, Codex); templates of Qwen3.5 and newer, Gemma and
Mistral refuse those. They then stand in the user's turn, where they were said, and not in the first message: what came
before them stays the prefix that the KV cache has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import takewhile
from typing import Any

from octavo.text.chat_template import ChatTemplateError, TemplateLimitError
from octavo.text.content_format import joined

_ROLES = ("system", "developer")


def rendered(messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> str:
    """The prompt that ``render`` makes of the messages, with system messages where the template takes them. Raises its
    ChatTemplateError for the messages as they are if it takes no form of them."""
    try:
        return render(messages)
    except TemplateLimitError:
        raise  # as it would in another form
    except ChatTemplateError as error:
        for form in rewritten(messages):
            with suppress(ChatTemplateError):
                return render(form)
        raise error


def rewritten(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The conversation in other forms, for templates that refuse it as it is: with one system message, which is the
    first, and with none. Nothing where there are no system messages."""
    first = list(takewhile(_instructs, messages))
    rest = messages[len(first) :]
    if len(first) > 1 or any(map(_instructs, rest)):
        yield [*_joined(first), *_folded(rest)]
    if first:
        yield _folded([{**_joined(first)[0], "role": "user"}, *rest], begun=True)


def _instructs(message: dict[str, Any]) -> bool:
    return message["role"] in _ROLES


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    text = "\n\n".join(message["content"] for message in messages)
    return [{**messages[0], "content": text}] if messages else []


def _folded(messages: list[dict[str, Any]], begun: bool = False) -> list[dict[str, Any]]:
    """Fold system messages: each ends the user's turn before it, begins the one after it, or is a turn by itself, so
    that turns alternate where they did. ``begun``: the first one is a system message in the user's place."""
    found: list[dict[str, Any]] = []
    joins = False  # the last turn holds a system message, and the user's words may follow in it
    for i, message in enumerate(messages):
        instructs = _instructs(message)
        if instructs:
            text = f"<system-reminder>\n{message['content']}\n</system-reminder>"
            message = {"role": "user", "content": text}
        if found and message["role"] == found[-1]["role"] == "user" and (instructs or joins):
            found[-1] = joined(found[-1], message)
        else:
            found.append(message)
        joins = instructs or (begun and i == 0)
    return found
