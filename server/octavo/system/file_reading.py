"""Reading files: pieces of weights into memory of our own, JSON as objects.

Files of weights are not mapped: one that shrinks while it is mapped ends the process (SIGBUS), page faults are slow on
network file systems, and mapped pages count as the process's memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.errors import ModelError


def read_into(buffer: memoryview, path: Path, offset: int, what: str) -> None:
    """Fill ``buffer`` (bytes) from ``offset``. Raises ModelError when the file ends before, naming ``what``."""
    done = 0
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            while done < len(buffer):
                count = file.readinto(buffer[done:])  # the system reads at most 2 GB at once
                if not count:
                    raise ModelError(f"{path} is cut short at {what}; fetch it again")
                done += count
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelError when the file cannot be read or is not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); fetch the model again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}, expected an object; fetch the model again")
    return value
