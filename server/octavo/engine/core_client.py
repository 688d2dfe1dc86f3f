"""The front end's side of the core process: sends requests, passes results to a callback on the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec

from octavo.engine.block_map import read_block_map
from octavo.engine.core_launcher import CoreProcess
from octavo.engine.output_codec import decode_outputs
from octavo.errors import EngineDeadError, OctavoError
from octavo.interface.engine_config import EngineConfig
from octavo.interface.images import ImageItem
from octavo.interface.lora import Adapter, AdapterAnswer
from octavo.interface.memory_file import send_file
from octavo.interface.messages import EngineCoreOutputs, EngineCoreRequest
from octavo.system.channel import Frames, Kind, frame
from octavo.system.parent import describe_exit

logger = logging.getLogger(__name__)

_READ_SECONDS = 0.002  # longest time to process results before other tasks of the event loop run


@dataclass
class CoreReady:
    """The core's message once the model is loaded. ``config`` is the resolved one: max_model_len may be lower."""

    config: dict[str, Any]
    num_blocks: int
    blocks_of_longest: int  # that a sequence of max_model_len takes at most
    kv_groups: int = 1  # of layers: a sequence has a table of blocks for each
    weight_bytes: dict[str, int] = field(default_factory=dict)  # by kind: "int4", "bfloat16"
    memory_shares: dict[str, int] = field(default_factory=dict)  # bytes by what they are for
    phases: dict[str, float] = field(default_factory=dict)  # seconds

    @property
    def engine_config(self) -> EngineConfig:
        """``config`` as an EngineConfig."""
        return EngineConfig.from_dict(self.config)


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
        self._decode_blocks = msgspec.msgpack.Decoder(list[list[int]]).decode
        self._decode_ready = msgspec.msgpack.Decoder(CoreReady).decode
        self._frames = Frames()
        self._asked: deque[asyncio.Future[list[list[int]]]] = deque()  # answers come in the order of the questions
        self._decode_adapter = msgspec.msgpack.Decoder(AdapterAnswer).decode
        self._adapters: deque[asyncio.Future[AdapterAnswer]] = deque()  # asked for; answers come in that order, too
        self._transport: asyncio.Transport | None = None
        self._closed = asyncio.Event()  # the core has closed its end, and everything it sent has been read
        self.exit_code: int | None = None
        self._ending: asyncio.Future[None] | None = None
        threading.Thread(target=self._wait_for_exit, name="core-exit", daemon=True).start()

    async def wait_ready(self) -> CoreReady:
        """Connect, and wait until the model is loaded. Raises OctavoError with the core's own message when it cannot
        start, EngineDeadError when the process ends without one."""
        await self._loop.create_unix_connection(lambda: self, sock=self.process.socket)
        return await asyncio.shield(self._ready)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request."""
        if request.mm_items:
            request = replace(request, mm_items=[self._handed_over(item) for item in request.mm_items])
        self._send(Kind.ADD, request)

    def _handed_over(self, item: ImageItem) -> ImageItem:
        """An image whose file, if it has one, is with the core, or else with the numbers in it."""
        if item.file is None:
            return item
        try:
            send_file(self.process.files, item.digest, item.file)
        except OSError:  # the core has not fetched those before it
            return item.without_file(item.file.content)
        return item.without_file(None)

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests; unknown ids are ignored."""
        self._send(Kind.ABORT, request_ids)

    def finish_samples(self, samples: list[tuple[str, int]]) -> None:
        """End sequences, given as (request id, index), whose text has matched a stop string."""
        self._send(Kind.FINISH_SAMPLES, samples)

    def read_block_map(self) -> bytes:
        """A byte for each block of the KV cache (see `octavo.interface.block_map`); none while the model loads."""
        return read_block_map(self.process.shared_fd)

    async def block_ids(self, request_id: str) -> list[list[int]]:
        """The ids of the blocks that each sample of a request holds; nothing for an unknown one. The core answers
        between two steps."""
        answer: asyncio.Future[list[list[int]]] = self._loop.create_future()
        self._send(Kind.BLOCKS_OF, request_id)
        self._asked.append(answer)
        return await answer

    def frozen_requests(self, request_ids: Iterable[str], seconds: float) -> list[str]:
        """The requests whose core has sent no heartbeat for that many seconds: all or none."""
        return list(request_ids) if self.heartbeat.seconds_since_beat() > seconds else []

    def fail_questions(self, error: OctavoError) -> None:
        """Raise ``error`` in everyone who waits for the core's answer. A later answer is dropped."""
        unanswered: list[asyncio.Future[Any]] = [*self._asked, *self._adapters]
        for answer in unanswered:
            if not answer.done():
                answer.set_exception(error)

    async def load_adapter(self, adapter: Adapter) -> AdapterAnswer:
        """Have the core read an adapter, and check it."""
        answer: asyncio.Future[AdapterAnswer] = self._loop.create_future()
        self._send(Kind.LOAD_ADAPTER, adapter)
        self._adapters.append(answer)
        return await answer

    def _send(self, kind: Kind, message: Any) -> None:
        """Never blocks: the transport buffers what the core does not read yet."""
        if self.exit_code is not None:
            raise EngineDeadError(f"the engine core has ended with exit code {self.exit_code}")
        assert self._transport is not None, "wait_ready comes first"
        self._transport.write(frame(kind, self._encode(message)))

    # -- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Read frames."""
        self._frames.feed(data)
        self._read(_READ_SECONDS)

    def connection_lost(self, error: Exception | None) -> None:
        """Report that the core has closed its end."""
        self._read(float("inf"))  # what came last
        self._closed.set()

    def _read(self, limit: float) -> None:
        """Process what has arrived, for at most ``limit`` seconds; the rest after other tasks of the event loop."""
        until = time.monotonic() + limit
        while found := self._frames.take():
            self._take(*found)
            if time.monotonic() > until:
                assert self._transport is not None
                self._transport.pause_reading()
                self._loop.call_soon(self._read_on)
                return

    def _read_on(self) -> None:
        if not self._closed.is_set():
            assert self._transport is not None
            self._transport.resume_reading()
            self._read(_READ_SECONDS)

    def _take(self, kind: Kind, payload: bytearray) -> None:
        if kind is Kind.OUTPUTS:
            self._on_outputs(decode_outputs(payload))
        elif kind is Kind.BLOCKS:
            answer = self._asked.popleft()
            if not answer.done():
                answer.set_result(self._decode_blocks(payload))
        elif kind is Kind.ADAPTER:
            loaded = self._adapters.popleft()
            if not loaded.done():
                loaded.set_result(self._decode_adapter(payload))
        elif kind is Kind.READY:
            self._ready.set_result(self._decode_ready(payload))
        elif not self._ready.done():
            self._ready.set_exception(OctavoError(msgspec.msgpack.decode(payload, type=str)))

    def _wait_for_exit(self) -> None:
        code = self.process.process.wait()
        try:
            self._loop.call_soon_threadsafe(self._exited, code)
        except RuntimeError:  # the loop is closed
            pass

    def _exited(self, code: int) -> None:
        self._ending = asyncio.ensure_future(self._end(code))

    async def _end(self, code: int) -> None:
        await self._closed.wait()
        self.exit_code = code
        self.fail_questions(EngineDeadError(f"the engine core {describe_exit(code)}; see its log"))
        if not self._ready.done():
            self._ready.set_exception(
                EngineDeadError(f"the engine core {describe_exit(code)} before it was ready; see its log above")
            )
            self._ready.exception()  # retrieved, also if nobody waits
        self._on_exit(code)

    def close(self, grace: float = 5.0) -> None:
        """End the core process, by force after ``grace`` seconds, and close the socket."""
        if self._transport is not None:
            self._transport.abort()
        self.process.stop(grace)
