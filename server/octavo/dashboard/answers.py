"""Answers of the server as they come, for any tab."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from octavo.chat_client import Answer, MessageRefusedError, stream
from octavo.dashboard.session import Session
from octavo.errors import OctavoError

REFRESH_SECONDS = 0.05  # between two looks of a browser at a growing answer


@dataclass
class Reply:
    """One answer. ``error``: why it broke off, ``too_long``: the context is too small for the conversation;
    ``stopped``: by the visitor."""

    answer: Answer = field(default_factory=Answer)
    thought: str = ""
    error: str = ""
    too_long: bool = False
    stopped: bool = False
    done: bool = False

    @property
    def tokens_per_second(self) -> float | None:
        """Return the rate of the tokens after the first; None where it is not known."""
        return self.answer.tokens_per_second

    def figures(self) -> str:
        """Time to the first token, tokens a second, cached tokens: as far as they are known."""
        usage = self.answer.usage
        parts = [f"TTFT {1000 * self.answer.first_token:,.0f} ms"] if self.answer.first_token else []
        if (rate := self.tokens_per_second) is not None:
            parts += [f"{rate:,.1f} tok/s", f"{usage['completion_tokens']:,} tokens"]
        if prompt := int(usage.get("prompt_tokens") or 0):
            cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
            parts.append(f"{cached:,} of {prompt:,} prompt tokens cached")
        if self.stopped:
            parts.append("stopped")
        elif self.answer.finish_reason == "length":
            parts.append("cut off: raise max_tokens")
        return " · ".join(parts)


async def replies(
    session: Session, key: str | None, body: dict[str, Any], stop: asyncio.Event, refresh: float = REFRESH_SECONDS
) -> AsyncIterator[Reply]:
    """The reply to ``body``, again and again while it grows, every ``refresh`` seconds, the last time when it is done.
    ``stop`` ends the request wherever it is, as does closing the iterator."""
    reply = Reply()
    changed = asyncio.Event()

    async def read() -> None:
        try:
            async with session.async_client(key) as http:
                async for thought, _ in stream(http, body, reply.answer):
                    reply.thought += thought
                    changed.set()
        except OctavoError as error:
            reply.error, reply.too_long = str(error), isinstance(error, MessageRefusedError) and error.too_long
        except (AttributeError, LookupError, TypeError, UnicodeError) as error:
            reply.error = f"the answer is no stream of chat completions: {type(error).__name__}: {error}"
        finally:
            reply.done = True
            changed.set()

    reading = asyncio.create_task(read())
    stopping = asyncio.create_task(stop.wait())
    stopping.add_done_callback(lambda _: changed.set())
    try:
        finished = False
        while not finished:
            await changed.wait()
            changed.clear()
            if stop.is_set() and not reply.done:
                reply.stopped = True
                reading.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await reading
            finished = reply.done  # else what comes while the browser is told would not be shown
            shown = time.monotonic()
            yield reply
            if not finished:
                await asyncio.sleep(max(0.0, refresh - (time.monotonic() - shown)))
    finally:
        reading.cancel()
        stopping.cancel()
