"""Common parts of the events of all tabs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from html import escape
from typing import Any

from octavo.errors import OctavoError

# Events that are part of the page: not an API for others, no bars and shades over what they change, for any number of
# visitors at once.
QUIET: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "concurrency_limit": None}


@contextlib.contextmanager
def errors_shown() -> Iterator[None]:
    """An OctavoError becomes a message on the page."""
    import gradio as gr

    try:
        yield
    except OctavoError as error:
        raise gr.Error(escape(str(error)), print_exception=False) from None


Updates = AsyncGenerator[dict[Any, Any], None]  # of components


async def restoring(updates: Updates, idle: Callable[[], dict[Any, Any]]) -> Updates:
    """``updates``; should they end by an error, then ``idle()`` before it is shown: no button stays disabled."""
    try:
        async with contextlib.aclosing(updates):
            async for update in updates:
                yield update
    except Exception:
        yield idle()
        raise
