"""Places in a conversation up to which a client wants its prompt found again. Pure.

A dialect writes marks at these places into a copy of the conversation. Where a mark stands in the copy's prompt, there
the prompt itself ends what is to be found again.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

MOST = 4  # places in a request
_SECRET = f"cut{secrets.token_hex(8)}n"  # which no text contains, and no template or tokenizer changes


@dataclass
class Marked:
    """A conversation with marks: its messages, checked, and the tools that its prompt lists."""

    messages: list[dict[str, Any]]
    listed: list[dict[str, Any]] | None
    seconds: list[float]  # for which what ends at each mark is to be found


@dataclass
class Keep:
    """Parts of a prompt that are to be found again: up to marks, and ``whole`` for so many seconds (0: it is not)."""

    marked: Marked | None = None
    whole: float = 0.0


def mark(number: int) -> str:
    """The mark at a request's place of that number."""
    return f"{_SECRET}{number}x"


def cuts(marked: str, text: str, seconds: list[float]) -> list[tuple[int, float]]:
    """The lengths in characters of what of the prompt ``text`` is to be found again, ascending, with the seconds.
    ``marked``: the prompt with marks, of which a template may have left some out."""
    found = []
    for number, time in enumerate(seconds):
        before, at, behind = marked.partition(mark(number))
        if at and time:
            found.append((_common(before, text), time))
        marked = before + behind
    return sorted(cut for cut in found if cut[0])


def _common(a: str, b: str) -> int:
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
