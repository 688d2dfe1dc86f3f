"""``octavo list``: the models on this machine."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from octavo.fetch.progress import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `octavo list`."""
    parser.add_argument(
        "--download-dir", help="Folder of fetched models (default: the caches of Octavo and Hugging Face)"
    )
    parser.add_argument("--json", action="store_true", help="Print a JSON list (default: a table)")


def run(args: argparse.Namespace) -> int:
    """Prints a line a model. Raises ModelError."""
    rows = _rows(args.download_dir)
    if args.json:
        print(json.dumps(rows))
        return 0
    titles = ("name", "size", "quantization", "context", "modified", "format", "path")
    table = [[title.upper() for title in titles]]
    for row in rows:
        shown = row | {"size": format_bytes(row["size"]), "modified": _ago(time.time() - row["modified"])}
        table.append(["-" if shown[title] is None else str(shown[title]) for title in titles])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    return 0


def _ago(seconds: float) -> str:
    """A time that is over, in the largest unit of which there is at least one."""
    for unit, length in (
        ("month", 30 * 86_400),
        ("week", 7 * 86_400),
        ("day", 86_400),
        ("hour", 3_600),
        ("minute", 60),
    ):
        if (count := int(seconds // length)) >= 1:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def _rows(download_dir: str | None) -> list[dict[str, Any]]:
    from octavo.errors import OctavoError
    from octavo.fetch.description import describe_path
    from octavo.fetch.installed import installed

    rows = []
    for model in installed(download_dir):
        row: dict[str, Any] = {"name": model.name, "size": model.num_bytes, "format": "unreadable"}
        row |= {"quantization": None, "context": None, "modified": model.modified, "path": str(model.path)}
        try:
            said = describe_path(model.path)
        except (OctavoError, OSError):  # one damaged file does not hide the others
            pass
        else:
            row |= {"format": said.format, "quantization": said.quantization, "context": said.context_length}
        rows.append(row)
    return rows
