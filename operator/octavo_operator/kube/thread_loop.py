"""Runs a coroutine in a thread and an event loop of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger("octavo.operator.thread_loop")


async def run_in_thread_loop(
    name: str, make: Callable[[], Coroutine[Any, Any, None]], stop_timeout: float = 15.0
) -> None:
    """Runs ``make()`` until it ends, and raises what it raises. Cancelling this cancels it, and waits at most
    `stop_timeout` seconds for its end.

    For code that assumes that the event loop is its own, and cancels every task in it when it ends.
    """
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _, context: _log_briefly(name, context))
    task = loop.create_task(make())
    ended: concurrent.futures.Future[None] = concurrent.futures.Future()

    def work() -> None:
        try:
            with contextlib.suppress(Exception, asyncio.CancelledError):  # the task keeps it
                loop.run_until_complete(task)
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()
            error = task.exception() if task.done() and not task.cancelled() else None
            ended.set_exception(error) if error else ended.set_result(None)

    threading.Thread(target=work, name=name, daemon=True).start()
    waiting = asyncio.wrap_future(ended)
    try:
        await asyncio.shield(waiting)
    except asyncio.CancelledError:
        with contextlib.suppress(RuntimeError):  # it has just ended by itself
            loop.call_soon_threadsafe(task.cancel)
        await asyncio.wait({waiting}, timeout=stop_timeout)
        raise


def _log_briefly(name: str, context: dict[str, Any]) -> None:
    """Log what tasks raised that were left when the coroutine ended: nobody awaits them."""
    logger.info("%s: %s: %r", name, context.get("message"), context.get("exception"))
