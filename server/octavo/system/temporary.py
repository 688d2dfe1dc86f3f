"""Files and folders in the temporary folder, which may be full or not there."""

from __future__ import annotations

import os
import tempfile
from typing import IO

from octavo.errors import OctavoError


def temporary_file() -> IO[bytes]:
    """A file without a name. Raises OctavoError."""
    try:
        return tempfile.TemporaryFile()
    except OSError as error:
        raise _unusable(error) from None


def temporary_folder(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """A folder that goes with the object. Raises OctavoError."""
    try:
        return tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise _unusable(error) from None


def allocate(descriptor: int, size: int) -> None:
    """Make a file at least ``size`` bytes long, with room for all of them: a mapped page for which there is none ends
    the process that writes it (SIGBUS). Raises OctavoError."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            end = os.fstat(descriptor).st_size
            os.pwrite(descriptor, bytes(max(0, size - end)), end)
    except OSError as error:
        raise _unusable(error) from None


def _unusable(error: OSError) -> OctavoError:
    folder = tempfile.tempdir or os.environ.get("TMPDIR") or "/tmp"
    return OctavoError(
        f"the temporary folder, {folder}, cannot be used: {error.strerror or error}; free some room there, or set "
        "TMPDIR to a folder with some"
    )
