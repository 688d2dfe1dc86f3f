"""Docstrings begin with their subject or their verb."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A reader who has not read the body cannot tell the subject of "Of its layers", "What it keeps" or "Whether it does".
RIDDLE = re.compile(
    r"(What|Whether|Of|How|Where|Which|Why|Those|With|In|By|That|As|From|Around|Until|Without|Whatever|Whose|Who|Whom"
    r"|Under|Through)\b"
)


@pytest.mark.parametrize("package", ["server", "kernels", "operator"])
def test_docstrings_begin_with_their_subject_or_verb(package: str) -> None:
    files = (file.relative_to(ROOT) for file in (ROOT / package).rglob("*.py"))
    refused = [
        f"{file}:{line}: {first!r}"
        for file in files
        for line, first in riddles((ROOT / file).read_text(encoding="utf-8"))
    ]
    assert not refused, f"name the result (True if ...) or the action (Return ...) first: {', '.join(refused)}"


@pytest.mark.parametrize(
    "source",
    [
        '"""What it keeps."""',
        'def f() -> int:\n    """Of its layers."""',
        'class C:\n    x = 1\n    """Whether it does."""',
        'async def f() -> int:\n    """\n    Where, if anywhere."""',
    ],
)
def test_a_docstring_that_begins_with_a_relative_clause_is_refused(source: str) -> None:
    assert list(riddles(source))


def test_a_docstring_that_begins_with_its_subject_is_kept() -> None:
    assert not list(riddles('"""Whole rows."""\ndef f() -> int:\n    """Return what it keeps."""'))


def riddles(source: str) -> Iterator[tuple[int, str]]:
    """The line and the first word of each docstring, also one behind a field, that RIDDLE matches."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found = RIDDLE.match(node.value.value.lstrip())
            if found is not None:
                yield node.lineno, found[1]
