"""Reading files: pieces of weights into memory of our own, JSON as objects.

Files of weights are not mapped: one that shrinks while it is mapped ends the process (SIGBUS), page faults are slow on
network file systems, and mapped pages count as the process's memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.errors import ModelError

_CHECKED = 1 << 18  # bytes that are checked at a time, while they are in the processor's cache


def read_into(
    buffer: memoryview,
    path: Path,
    offset: int,
    what: str,
    check: Callable[[memoryview], None] | None = None,
    unit: int = 8,
) -> None:
    """Fill ``buffer`` (bytes) from ``offset``, and give each piece that was read to ``check``, in whole ``unit`` bytes.
    Raises ModelError when the file ends before, naming ``what``."""
    size = _CHECKED // unit * unit if check else max(1, len(buffer))
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            for first in range(0, len(buffer), size):
                piece = buffer[first : first + size]
                done = 0
                while done < len(piece):
                    count = file.readinto(piece[done:])  # the system reads at most 2 GB at once
                    if not count:
                        raise ModelError(f"{path} is cut short at {what}; fetch it again")
                    done += count
                if check:
                    check(piece)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelError when the file cannot be read or is not a JSON object."""
    value = _read_json(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}, expected an object; fetch the model again")
    return value


def read_json_list(path: Path) -> list[Any]:
    """Raises ModelError when the file cannot be read or is not a JSON list."""
    value = _read_json(path)
    if not isinstance(value, list):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}, expected a list; fetch the model again")
    return value


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); fetch the model again") from None
