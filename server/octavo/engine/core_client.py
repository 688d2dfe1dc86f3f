"""The front end's end of the channel to the core: sends requests, hands results to a callback on the event loop."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from octavo.engine.channel import Frames, Kind, frame
from octavo.engine.launcher import CoreProcess
from octavo.engine.packing import unpack
from octavo.errors import EngineDeadError, OctavoError
from octavo.interface.engine_config import EngineConfig
from octavo.interface.messages import EngineCoreOutputs, EngineCoreRequest

logger = logging.getLogger(__name__)

_READ_SECONDS = 0.002  # that the event loop takes in results, and hands them on, in one go


@dataclass
class CoreReady:
    """What the core says once the model is loaded. ``config`` is the one it runs with: max_model_len may be lower."""

    config: dict[str, Any]
    num_blocks: int
    phases: dict[str, float] = field(default_factory=dict)  # seconds

    @property
    def engine_config(self) -> EngineConfig:
        return EngineConfig.from_dict(self.config)


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code == -signal.SIGKILL:
        return "was killed by signal 9 (the kernel does that when memory runs out)"
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


class CoreClient(asyncio.Protocol):
    """Belongs to one event loop. ``on_exit`` is called once, with the exit code, when the core process has ended."""

    def __init__(
        self,
        process: CoreProcess,
        on_outputs: Callable[[EngineCoreOutputs], None],
        on_exit: Callable[[int], None],
    ) -> None:
        self.process = process
        self.heartbeat = process.heartbeat
        self._on_outputs = on_outputs
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[CoreReady] = self._loop.create_future()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode_ready = msgspec.msgpack.Decoder(CoreReady).decode
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._silent = asyncio.Event()  # the core has closed its end, and all it said has been read
        self.exit_code: int | None = None
        self._ending: asyncio.Future[None] | None = None
        threading.Thread(target=self._wait_for_exit, name="core-exit", daemon=True).start()

    async def wait_ready(self) -> CoreReady:
        """Raises OctavoError with the core's own words when it cannot start, EngineDeadError when it just ends."""
        await self._loop.create_unix_connection(lambda: self, sock=self.process.socket)
        return await asyncio.shield(self._ready)

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(Kind.ADD, request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._send(Kind.ABORT, request_ids)

    def finish_samples(self, samples: list[tuple[str, int]]) -> None:
        """End sequences, given as (request id, index), whose text has matched a stop string."""
        self._send(Kind.FINISH_SAMPLES, samples)

    def _send(self, kind: Kind, message: Any) -> None:
        """Never waits: what the core does not take yet stays with the transport."""
        if self.exit_code is not None:
            raise EngineDeadError(f"the engine core has ended with exit code {self.exit_code}")
        assert self._transport is not None, "wait_ready comes first"
        self._transport.write(frame(kind, self._encode(message)))

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        self._read(_READ_SECONDS)

    def connection_lost(self, error: Exception | None) -> None:
        self._read(float("inf"))  # its last words
        self._silent.set()

    def _read(self, limit: float) -> None:
        """Take in what has arrived; what would hold up the event loop for too long, when others had their turn."""
        until = time.monotonic() + limit
        while found := self._frames.take():
            self._take(*found)
            if time.monotonic() > until:
                assert self._transport is not None
                self._transport.pause_reading()
                self._loop.call_soon(self._read_on)
                return

    def _read_on(self) -> None:
        if not self._silent.is_set():
            assert self._transport is not None
            self._transport.resume_reading()
            self._read(_READ_SECONDS)

    def _take(self, kind: Kind, payload: bytearray) -> None:
        if kind is Kind.OUTPUTS:
            self._on_outputs(unpack(payload))
        elif kind is Kind.READY:
            self._ready.set_result(self._decode_ready(payload))
        elif not self._ready.done():
            self._ready.set_exception(OctavoError(msgspec.msgpack.decode(payload, type=str)))

    def _wait_for_exit(self) -> None:
        code = self.process.process.wait()
        try:
            self._loop.call_soon_threadsafe(self._exited, code)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            pass

    def _exited(self, code: int) -> None:
        self._ending = asyncio.ensure_future(self._end(code))

    async def _end(self, code: int) -> None:
        await self._silent.wait()
        self.exit_code = code
        if not self._ready.done():
            self._ready.set_exception(
                EngineDeadError(f"the engine core {how_it_ended(code)} before it was ready; see its log above")
            )
            self._ready.exception()  # seen, even if nobody waits
        self._on_exit(code)

    def close(self, grace: float = 5.0) -> None:
        """End the core process and let go of the socket."""
        if self._transport is not None:
            self._transport.abort()
        self.process.stop(grace)
