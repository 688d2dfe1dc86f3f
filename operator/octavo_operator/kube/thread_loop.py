"""Runs a coroutine apart from all others, in a thread and an event loop of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger("octavo.operator.own_loop")


async def in_own_loop(name: str, make: Callable[[], Coroutine[Any, Any, None]], patience: float = 15.0) -> None:
    """Until it ends, and raises what it raises. When we are cancelled, so is it; `patience`: seconds that it has then.

    For what takes the whole event loop to be its own, and cancels every task in it when it ends.
    """
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _, said: _log_briefly(name, said))
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
        await asyncio.wait({waiting}, timeout=patience)
        raise


def _log_briefly(name: str, said: dict[str, Any]) -> None:
    """Nobody waits for what fails here: what was left lying when the coroutine ended."""
    logger.info("%s: %s: %r", name, said.get("message"), said.get("exception"))
