"""A progress bar for the benches: on a terminal only, so that results stay readable in files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from octavo.system.progress_bar import progress_bar as drawn


@contextmanager
def progress_bar(what: str, total: int, enabled: bool = True) -> Iterator[Callable[[], None]]:
    """Yields a function that counts one more."""
    columns = ("MofNCompleteColumn", "TimeElapsedColumn", "TimeRemainingColumn")
    # Twice a second: drawing takes processor time, and the server that is measured may be on the same machine.
    bar = drawn(what, total, *columns, refresh_per_second=2) if enabled and sys.stderr.isatty() else None
    if bar is None:
        yield lambda: None
        return
    with bar:
        yield lambda: bar.advance(bar.task_ids[0])
