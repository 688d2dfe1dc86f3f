"""Parts of a page that a program writes: the text between two marks is replaced, the rest is left to people."""

from __future__ import annotations

from pathlib import Path


def replace_section(page: Path, name: str, text: str) -> None:
    """Raises ValueError when ``page`` lacks the marks ``<!-- begin: name -->`` and ``<!-- end: name -->``."""
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    content = page.read_text()
    head, found, rest = content.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page.name} has no section {name}: put {begin} and {end} where it belongs")
    page.write_text(f"{head}{begin}\n{text.strip()}\n{end}{tail}")
