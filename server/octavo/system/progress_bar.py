"""A bar of progress on stderr, drawn by rich where it is installed."""

from __future__ import annotations

from typing import Any


def progress_bar(what: str, total: float | None, *columns: str, **options: Any) -> Any:
    """rich's Progress with one task, for a ``with``; None without rich. ``columns`` stand behind the bar: classes of
    `rich.progress`, or texts with ``{task.fields[note]}``; ``options``: of Progress."""
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        return None
    first = progress.TextColumn("{task.description}"), progress.BarColumn()
    more = (progress.TextColumn(name) if "{" in name else getattr(progress, name)() for name in columns)
    bar = progress.Progress(*first, *more, console=Console(stderr=True), **options)
    bar.add_task(what, total=total, note="")
    return bar
