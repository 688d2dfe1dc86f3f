"""Boundaries of a chat's prompt, where it may go on differently: states of recurrent layers are kept there. Pure.

The next turn repeats a conversation, but not always as it was generated: templates drop thoughts of earlier turns, and
write calls and tags anew. What surely stays is the prompt before the answer, the prompt up to the user's last message,
after which an agent's rounds lie, and what stands before the user's first one.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import suppress
from itertools import takewhile
from typing import Any

from octavo.text.chat_template import ChatTemplateError

Messages = list[dict[str, Any]]


def beginnings(messages: Messages, text: str, render: Callable[[Messages], str]) -> list[str]:
    """The texts with which the prompt ``text`` of ``messages`` begins and after which others may differ, the shortest
    first. ``render`` writes messages without opening an answer; it may raise ChatTemplateError."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    found = set[str]()
    for part in (messages, messages[: users[-1] + 1] if users else []):
        if part:
            with suppress(ChatTemplateError):
                found.add(render(part))
    found = {part for part in found if text.startswith(part)}
    system = list(takewhile(lambda message: message["role"] in ("system", "developer"), messages))
    if users:
        with suppress(ChatTemplateError):  # of another user
            others = [render([*system, {"role": "user", "content": word}]) for word in "01"]
            differ = (i for i, letters in enumerate(zip(text, *others, strict=False)) if len(set(letters)) > 1)
            found.add(text[: next(differ, 0)])
    return sorted(part for part in found if 0 < len(part) < len(text))


def positions(parts: list[str], ids: list[int], tokenize: Callable[[str], list[int]], special: Set[int]) -> list[int]:
    """The numbers of tokens of the prompt ``ids`` that ``parts`` of its text surely have, ascending. The last token
    counts only if a ``special`` one follows: the text that follows may join it."""
    found = set[int]()
    for part in parts:
        own = tokenize(part)
        pairs = enumerate(zip(own, ids, strict=False))
        common = next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(own), len(ids)))
        if common == len(own) and ids[common : common + 1] and ids[common] not in special:
            common -= 1
        found.add(common)
    return sorted(position for position in found if 0 < position < len(ids))
