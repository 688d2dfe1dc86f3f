"""Reading a piece of a weights file into memory of our own.

Files are not mapped for this: one that shrinks while it is mapped ends the process (SIGBUS), page faults are slow on
network file systems, and mapped pages count as the process's memory.
"""

from __future__ import annotations

from pathlib import Path

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
