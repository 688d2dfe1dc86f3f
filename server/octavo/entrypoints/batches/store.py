"""The files of batches: on disk, within limits, for as long as the server runs."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from octavo.entrypoints.batches.answers import FileAnswer
from octavo.entrypoints.errors import APIError, bad_request
from octavo.entrypoints.replica import elsewhere, new_id

MAX_FILE_BYTES = 100 << 20
MAX_STORE_BYTES = 1 << 30
MAX_FILES = 1_000
MAX_NAME = 255  # characters of a file's name, as on most disks
LIFETIME = 7 * 24 * 3600  # seconds


class FileStore:
    """``clock`` gives seconds since the epoch; ``tag`` is what ids name this replica by. The folder
    is deleted with the store, or when the process ends."""

    def __init__(self, clock: Callable[[], float] = time.time, tag: str = "") -> None:
        self._clock, self._tag = clock, tag
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-batches-")
        self._files: dict[str, FileAnswer] = {}
        self._lock = threading.Lock()  # around what is counted: files arrive in threads

    def add(self, filename: str, data: bytes | memoryview, purpose: str, lifetime: int = LIFETIME) -> FileAnswer:
        """Keep a file. Raises APIError where there is no room, and for a name that is too long."""
        if len(filename) > MAX_NAME:
            raise bad_request(
                f"the file's name has {len(filename)} characters, more than {MAX_NAME}; shorten it", "file"
            )
        if len(data) > MAX_FILE_BYTES:
            raise APIError(
                413, f"file has {len(data)} bytes, more than the {MAX_FILE_BYTES} that one may have; split it"
            )
        self._make_room(len(data))
        made = self.open_output(filename, purpose, lifetime)
        try:
            self.append(made, data)
        except APIError:
            self.delete(made.id)
            raise
        return made

    def open_output(self, filename: str, purpose: str, lifetime: int = LIFETIME) -> FileAnswer:
        """An empty file."""
        now = int(self._clock())
        made = FileAnswer(new_id("file-", self._tag), 0, now, filename, purpose, now + lifetime)
        self._files[made.id] = made
        return made

    def append(self, file: FileAnswer, data: bytes | memoryview) -> None:
        """Write at the end of a file, all or nothing. Raises APIError where there is no room."""
        with self._lock:
            if self._num_bytes + len(data) > MAX_STORE_BYTES:
                raise APIError(507, f"the files of batches take {MAX_STORE_BYTES} bytes already; delete some")
            before = file.bytes
            file.bytes += len(data)
        try:
            with open(self.path(file), "ab") as target:
                target.write(data)
        except OSError as error:
            file.bytes = before
            with contextlib.suppress(OSError):
                os.truncate(self.path(file), before)
            raise APIError(507, f"cannot write files of batches: {error.strerror or error}") from None

    def get(self, file_id: str, field: str = "file_id") -> FileAnswer:
        """Raises a 404 for a file that is not there, or has expired."""
        self.drop_expired()
        if file_id not in self._files:
            why = elsewhere(file_id, self._tag) or "it may have expired"
            raise APIError(404, f"there is no file {file_id[:100]!r}: {why}", param=field)
        return self._files[file_id]

    def path(self, file: FileAnswer) -> Path:
        """The path of a file's bytes."""
        return Path(self._folder.name, file.id)

    def listed(self) -> list[FileAnswer]:
        """All, newest first."""
        self.drop_expired()
        return list(self._files.values())[::-1]

    def delete(self, file_id: str) -> None:
        """Forget a file, unless it is forgotten."""
        file = self._files.pop(file_id, None)
        if file is not None:
            self.path(file).unlink(missing_ok=True)

    def drop_expired(self) -> None:
        """Forget the files whose time is over."""
        now = self._clock()
        for file in [file for file in list(self._files.values()) if file.expires_at <= now]:
            self.delete(file.id)

    def close(self) -> None:
        """Delete all."""
        self._files.clear()
        self._folder.cleanup()

    @property
    def _num_bytes(self) -> int:
        return sum(file.bytes for file in list(self._files.values()))

    def _make_room(self, size: int) -> None:
        self.drop_expired()
        if len(self._files) >= MAX_FILES:
            raise bad_request(f"there are {MAX_FILES} files already; delete some", "file")
        if self._num_bytes + size > MAX_STORE_BYTES:
            raise APIError(507, f"the files of batches take {MAX_STORE_BYTES} bytes already; delete some")
