"""Hugging Face's `generate` in a process of its own, seen from the page's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from octavo.errors import OctavoError

REFRESH_SECONDS = 0.25  # between two looks at an answer: more would take processor time from what is measured
_LONGEST_LINE = 16 << 20  # bytes


class HuggingFace:
    """One process, started for a model and kept for the next comparison until `stop`."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._what: tuple[Any, ...] = ()
        self._ready: dict[str, Any] = {}

    @property
    def pid(self) -> int | None:
        """The process, while it runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self, flags: Sequence[str], dtype: str | None) -> dict[str, Any]:
        """Load the model that ``flags`` of `octavo serve` name, unless it is loaded. Returns "dtype", "device"
        and "engine", the precision of Octavo with these flags. Raises OctavoError."""
        if self.pid is not None and self._what == (*flags, dtype):
            return self._ready
        await self.stop()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "octavo.dashboard.generate_process",
            limit=_LONGEST_LINE,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await self._send({"parent": os.getpid(), "flags": list(flags), "dtype": dtype})
            self._ready = (await self._receive())["ready"]
        except BaseException:
            await self.stop()
            raise
        self._what = (*flags, dtype)
        return self._ready

    async def generate(
        self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool
    ) -> AsyncIterator[dict[str, Any]]:
        """The messages of `generate_process` for a batch. Raises OctavoError; closing it early ends the process."""
        done = False
        try:
            await self._send({"prompts": prompts, "max_tokens": max_tokens, "ignore_eos": ignore_eos})
            while not done:
                message = await self._receive()
                done = "done" in message
                yield message
        finally:
            if not done:
                await self.stop()

    async def stop(self) -> None:
        """End the process, wherever it is."""
        process, self._process, self._what = self._process, None, ()
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _send(self, message: dict[str, Any]) -> None:
        if self._process is None or self._process.stdin is None:
            raise OctavoError("Hugging Face's process was stopped")
        with contextlib.suppress(ConnectionError):  # `_receive` says why
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()

    async def _receive(self) -> dict[str, Any]:
        process = self._process
        line = await process.stdout.readline() if process is not None and process.stdout is not None else b""
        if process is None or not line:
            code = await process.wait() if process is not None else None
            out_of_memory = " (out of memory?)" if code == -9 and self._process is process else ""
            raise OctavoError(f"Hugging Face's process ended{out_of_memory}")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise OctavoError(f"Hugging Face generate: {message['error']}")
        return message
