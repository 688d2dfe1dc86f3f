"""A progress bar for the benches: on a terminal only, so that results stay readable in files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str, total: int, enabled: bool = True) -> Iterator[Callable[[], None]]:
    """Yields a function that counts one more."""
    if not enabled or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    # Twice a second: drawing takes processor time, and the server that is measured may be on the same machine.
    with Progress(*columns, console=Console(file=sys.stderr), refresh_per_second=2) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
