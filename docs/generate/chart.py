"""The values of the Helm chart, from the comments of values.yaml."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from generate import markdown
from generate.source import ROOT

CHART = ROOT / "charts/octavo"
_BEGIN, _END = "<!-- begin: values -->", "<!-- end: values -->"


def page() -> str:
    head = (
        "Values of `charts/octavo`. Unknown ones are refused (`values.schema.json`). A comment about a group of values "
        "stands at the group."
    )
    return markdown.page("Values of the chart", head, _table())


def readme() -> str:
    """The chart's README with its table of values written anew."""
    before, _, rest = (CHART / "README.md").read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{_table()}\n{_END}{after}"


def _table() -> str:
    rows = [(f"`{path}`", markdown.code(default), markdown.prose(text)) for path, default, text in values(CHART)]
    return markdown.table(("value", "default", "meaning"), rows)


def values(chart: Path) -> Iterator[tuple[str, str, str]]:
    """Path, default (empty for a group of values that are described themselves) and description of every value."""
    text = (chart / "values.yaml").read_text()
    yield from _walk(yaml.compose(text), text.splitlines(), "")


def _walk(node: Any, lines: list[str], path: str) -> Iterator[tuple[str, str, str]]:
    for key, value in node.value:
        name = f"{path}{key.value}"
        described = _comment(lines, key.start_mark.line, key.start_mark.column)
        is_group = isinstance(value, yaml.MappingNode) and not value.flow_style
        if is_group:
            if described:
                yield name, "", described
            yield from _walk(value, lines, f"{name}.")
        else:
            default = yaml.safe_load(yaml.serialize(value))
            yield name, default if isinstance(default, str) and default else json.dumps(default), described


def _comment(lines: list[str], line: int, column: int) -> str:
    """The comment above a key that begins with `# --`."""
    found: list[str] = []
    while line > 0 and lines[line - 1].startswith(" " * column + "#"):
        line -= 1
        found.insert(0, lines[line].strip().removeprefix("#").strip())
        if found[0].startswith("--"):
            return " ".join(found).removeprefix("--").strip()
    return ""
