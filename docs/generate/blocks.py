"""The fenced blocks of Markdown pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCED = re.compile(r"^( *)```([^\n`]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Text between two fences, without what it is indented by. ``line`` is that of the first fence, from 1."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    """All blocks of a page in their order. Raises ValueError for a fence that is none of theirs."""
    text = page.read_text()
    found = list(_FENCED.finditer(text))
    if text.count("```") + text.count("~~~") != 2 * len(found):
        raise ValueError(f"{page.relative_to(ROOT)} has a fence that is not one of a pair of ```, each on its own line")
    for one in found:
        inner = re.sub(rf"^{one[1]}", "", one[3], flags=re.MULTILINE)
        yield Block(page, text.count("\n", 0, one.start()) + 1, one[2].strip(), inner)
