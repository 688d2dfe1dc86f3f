"""Markdown of the generated pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

GENERATED = "<!-- Generated from the code by `make reference`. -->\n"


def page(title: str, *parts: str) -> str:
    return "\n".join([GENERATED, f"# {title}", *(f"\n{part.strip()}" for part in parts if part.strip())]) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join(lines + [f"| {' | '.join(map(cell, row))} |" for row in rows])


def cell(text: str) -> str:
    """Text inside a table: on one line, with its bars escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: object) -> str:
    """As code, where there is something; in a table its bars are escaped by `cell`."""
    return f"`{text}`" if str(text) else ""


def prose(text: str) -> str:
    """Plain text, so that nothing in it is taken for markup."""
    for letter in "\\`*_<":
        text = text.replace(letter, "\\" + letter)
    return text
