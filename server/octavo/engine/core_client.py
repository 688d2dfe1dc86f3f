"""The front end's side of the core process: sends requests, hands results to a callback on the event loop."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from octavo.config import EngineConfig
from octavo.engine import core_proc
from octavo.engine.launcher import OUTPUT_SOCKET, REQUEST_SOCKET, CoreProcess
from octavo.engine.messages import EngineCoreOutputs, EngineCoreRequest
from octavo.errors import EngineDeadError, OctavoError

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


class CoreClient:
    """Belongs to one event loop. ``on_exit`` is called once, with the exit code, when the core process ends."""

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
        self._decode_outputs = msgspec.msgpack.Decoder(EngineCoreOutputs).decode
        self._decode_ready = msgspec.msgpack.Decoder(CoreReady).decode
        self._context = zmq.Context(io_threads=1)
        self._requests = self._bind(zmq.PUSH, REQUEST_SOCKET)
        self._outputs = self._bind(zmq.PULL, OUTPUT_SOCKET)
        self._loop.add_reader(self._outputs.FD, self._read)
        self.exit_code: int | None = None
        threading.Thread(target=self._wait_for_exit, name="core-exit", daemon=True).start()

    def _bind(self, kind: int, name: str) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(0)  # the server bounds its queue itself; a message must never block the event loop
        socket.linger = 0
        socket.bind(f"ipc://{self.process.directory / name}")
        return socket

    async def wait_ready(self) -> CoreReady:
        """Raises OctavoError with the core's own words when it cannot start, EngineDeadError when it just ends."""
        self._read()  # what arrived before the event loop watched
        ready = await asyncio.shield(self._ready)
        while not self._requests.getsockopt(zmq.EVENTS) & zmq.POLLOUT:  # type: ignore[operator, arg-type]
            await asyncio.sleep(0.005)  # a request sent before the core is connected would hold up the event loop
        self.process.remove_directory()  # both sides are connected: nothing of us is left on disk
        return ready

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(core_proc.ADD, request, request.request_id)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._send(core_proc.ABORT, request_ids)

    def finish_samples(self, samples: list[tuple[str, int]]) -> None:
        """End sequences, given as (request id, index), whose text has matched a stop string."""
        self._send(core_proc.FINISH_SAMPLES, samples)

    def _send(self, kind: bytes, message: Any, request_id: str = "") -> None:
        if self.exit_code is not None:
            raise EngineDeadError(f"the engine core has ended with exit code {self.exit_code}")
        self._requests.send_multipart([kind, request_id.encode(), self._encode(message)])
        # The socket's descriptor tells of new events only once: sending may have swallowed one that was for reading.
        self._loop.call_soon(self._read)

    def _read(self, limit: float = _READ_SECONDS) -> None:
        """Take in what has arrived. The descriptor is edge-triggered, so nothing may be left behind: what would hold up
        the event loop for too long is read when others had their turn."""
        until = time.monotonic() + limit
        while not self._outputs.closed and self._outputs.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator, arg-type]
            if time.monotonic() > until:
                self._loop.call_soon(self._read)
                return
            kind, payload = self._outputs.recv_multipart()
            if kind == core_proc.OUTPUTS:
                self._on_outputs(self._decode_outputs(payload))
            elif kind == core_proc.READY:
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
        self._read(limit=float("inf"))  # its last words
        self.exit_code = code
        if not self._ready.done():
            self._ready.set_exception(
                EngineDeadError(f"the engine core {how_it_ended(code)} before it was ready; see its log above")
            )
            self._ready.exception()  # seen, even if nobody waits
        self._on_exit(code)

    def close(self, grace: float = 5.0) -> None:
        """End the core process and let go of the sockets."""
        if not self._outputs.closed:
            self._loop.remove_reader(self._outputs.FD)
            self._outputs.close()
            self._requests.close()
            self._context.term()
        self.process.stop(grace)
