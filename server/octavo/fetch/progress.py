"""Progress of downloads: a bar on a terminal, plain lines elsewhere (logs of a pod)."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

from octavo.system.progress_bar import progress_bar

_COLUMNS = ("DownloadColumn", "TransferSpeedColumn", "TimeRemainingColumn")
_EVERY = 5.0  # seconds between plain lines


class Progress:
    """``total`` in bytes, None when it is not known. Writes to stderr; `advance` may be called from several threads."""

    def __init__(self, what: str, total: int | None = None, enabled: bool = True) -> None:
        self.what, self.total, self.done, self.enabled = what, total, 0, enabled
        self._bar: Any = None
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def __enter__(self) -> Progress:
        if self.enabled:
            if sys.stderr.isatty():
                self._bar = progress_bar(self.what, self.total, *_COLUMNS, transient=True)
            if self._bar is not None:
                self._bar.start()
            else:
                self._print_line(self.what + (f" ({format_bytes(self.total)})" if self.total else ""))
        return self

    def advance(self, count: int) -> None:
        """Count ``count`` more bytes."""
        with self._lock:
            self.done += count
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.done)
        elif self.enabled and time.monotonic() - self._last >= _EVERY:
            part = f" of {format_bytes(self.total)} ({100 * self.done // self.total} %)" if self.total else ""
            self._print_line(f"{self.what}: {format_bytes(self.done)}{part}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _print_line(self, line: str) -> None:
        self._last = time.monotonic()
        print(line, file=sys.stderr, flush=True)


def format_bytes(count: int) -> str:
    """``count`` bytes in decimal units, as "1.23 GB" or "4.5 MB"."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
