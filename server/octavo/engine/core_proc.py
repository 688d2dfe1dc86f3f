"""The engine core's process: one loop that receives requests, steps, and sends results.

    python -m octavo.engine.core_proc SOCKET FILES HEARTBEATS RANKS [NUMBER LINK...]  (octavo.engine.core_launcher does)

Configuration is one line of JSON on stdin. The end of stdin means that the parent has exited: so does this process.
Messages are msgpack over the inherited SOCKET, and descriptors of files in memory come over FILES: no pickle, nothing
that listens anywhere.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.engine.block_map import create_block_map
from octavo.engine.core_launcher import CoreOptions
from octavo.errors import OctavoError
from octavo.executor.multiproc import start_ranks
from octavo.executor.rank_processes import RankProcesses
from octavo.interface.memory_file import receive_file
from octavo.system.channel import Channel, Kind
from octavo.system.heartbeat import Heartbeat
from octavo.system.parent import die_with_parent, read_line_from_stdin

if TYPE_CHECKING:
    from octavo.engine.core import EngineCore
    from octavo.executor.lock_step import LockStep
    from octavo.interface.engine_config import ParallelConfig
    from octavo.interface.images import ImageItem
    from octavo.interface.lora import Adapter
    from octavo.interface.messages import EngineCoreOutputs

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
IDLE_SECONDS = 1  # without work before an integrity check
CHECK_SECONDS = 30  # between integrity checks, at least


class CoreProc:
    """The main loop. Blocks, using no CPU, while there is no work."""

    def __init__(
        self,
        core: EngineCore,
        channel: Channel,
        heartbeat: Heartbeat,
        links: Sequence[int] = (),
        files: socket.socket | None = None,
    ) -> None:
        """``links``: descriptors that other engines' steps make readable; over ``files`` come those of images."""
        import msgspec

        from octavo.engine.output_codec import encode_outputs
        from octavo.interface.lora import Adapter
        from octavo.interface.messages import EngineCoreRequest

        self._core, self._links = core, links
        self._channel, self._files = channel, files
        self._heartbeat = heartbeat
        self._decode_add = msgspec.msgpack.Decoder(EngineCoreRequest).decode
        self._decode_ids = msgspec.msgpack.Decoder(list[str]).decode
        self._decode_samples = msgspec.msgpack.Decoder(list[tuple[str, int]]).decode
        self._decode_adapter = msgspec.msgpack.Decoder(Adapter).decode
        self._adapters: deque[tuple[Adapter, Future[Adapter]]] = deque()  # being read, in the order of the questions
        self._decode_any = msgspec.msgpack.Decoder().decode
        self._encode_outputs, self._encode = encode_outputs, msgspec.msgpack.Encoder().encode
        self.busy = False
        self._checked = True  # nothing has been done yet
        self._last_check = time.monotonic()

    def run(self) -> None:
        """Run until the front end closes its end."""
        from octavo.interface.messages import EngineCoreOutputs

        core = self._core
        while True:
            if not core.has_unfinished_requests() and not self._adapters and not core.is_called:
                if self.busy:  # the final counts
                    self._send(EngineCoreOutputs(stats=core.scheduler.make_stats(), timestamp=time.time()))
                self.busy = False
                self._wait_for_work()
                self._heartbeat.progress(core.num_steps)
                self.busy = True
            try:
                for kind, payload in self._channel.receive():
                    self._handle(kind, payload)
            except EOFError:
                return
            if self._adapters:
                self._answer_adapters(wait=not core.has_unfinished_requests())
            if core.has_unfinished_requests():
                num_steps = core.num_steps
                self._send(core.step())
                if core.num_steps > num_steps:
                    self._heartbeat.progress(core.num_steps)
            elif core.is_called:
                core.keep_pace()
                self._heartbeat.progress(core.num_steps)

    def _wait_for_work(self) -> None:
        """Block. An idle engine checks its integrity: a fault is logged, it is not fatal."""
        if not self._checked and not self._channel.wait(IDLE_SECONDS, self._links):
            self._checked = True
            try:
                self._core.check_integrity()
            except AssertionError:
                logger.exception("integrity check failed: please report this")
        self._channel.wait(None, self._links)
        if time.monotonic() - self._last_check > CHECK_SECONDS:
            self._checked, self._last_check = False, time.monotonic()

    def _answer_adapters(self, wait: bool) -> None:
        """Tell of adapters that have been read; wait a little for the next one if there is nothing else to do."""
        from octavo.interface.lora import AdapterAnswer

        if wait:
            wait_for([self._adapters[0][1]], 0.01)
        while self._adapters and self._adapters[0][1].done():
            adapter, future = self._adapters.popleft()
            try:
                answer = AdapterAnswer(future.result())
            except Exception as error:
                if not isinstance(error, OctavoError):
                    logger.exception("adapter %r could not be loaded", adapter.name)
                answer = AdapterAnswer(adapter, str(error) or type(error).__name__)
            self._channel.send(Kind.ADAPTER, self._encode(answer))

    def _send(self, results: EngineCoreOutputs) -> None:
        self._channel.send(Kind.OUTPUTS, self._encode_outputs(results))

    def _handle(self, kind: Kind, payload: bytearray) -> None:
        """Handle one message. An error in it fails only its own request."""
        try:
            if kind is Kind.ADD:
                request = self._decode_add(payload)
                request.mm_items = request.mm_items and [self._with_numbers(item) for item in request.mm_items]
                self._core.add_request(request)
            elif kind is Kind.ABORT:
                self._core.abort_requests(self._decode_ids(payload))
            elif kind is Kind.FINISH_SAMPLES:
                for sample_of, index in self._decode_samples(payload):
                    self._core.finish_sample(sample_of, index)
            elif kind is Kind.LOAD_ADAPTER:
                adapter = self._decode_adapter(payload)
                self._adapters.append((adapter, self._core.load_adapter(adapter)))
            elif kind is Kind.BLOCKS_OF:
                self._channel.send(Kind.BLOCKS, self._encode(self._core.block_ids(self._decode_any(payload))))
            else:
                raise ValueError(f"{kind!r} is not for the core")
        except Exception as error:
            if kind is not Kind.ADD:
                logger.exception("a message of kind %r failed", kind)
                return
            request_id = self._decode_any(payload)["request_id"]
            if not isinstance(error, ValueError):
                logger.exception("request %s could not be added", request_id)
            self._refuse(request_id, str(error))

    def _with_numbers(self, item: ImageItem) -> ImageItem:
        """An image with what is in its file, which has been sent before it."""
        if all(tensor.place is None for tensor in item.tensors.values()):
            return item
        assert self._files is not None
        return item.without_file(receive_file(self._files, item.digest).content)

    def _refuse(self, request_id: str, error: str) -> None:
        from octavo.interface.messages import EngineCoreOutput, EngineCoreOutputs

        # Index -1: the whole request, whatever its number of samples.
        output = EngineCoreOutput(request_id, -1, [], finish_reason="error", error=error)
        self._send(EngineCoreOutputs([output], timestamp=time.time()))


def _memory_reader(device: str) -> Callable[[], tuple[int, int]]:
    """A function that reads the used and total bytes of the engine's device."""
    if device == "cuda":
        import torch

        def read_cuda() -> tuple[int, int]:
            free, total = torch.cuda.mem_get_info()
            return total - free, total

        return read_cuda
    from octavo.system.limits import memory_limit

    page, statm, total = os.sysconf("SC_PAGE_SIZE"), Path("/proc/self/statm"), memory_limit()
    return lambda: (int(statm.read_text().split()[1]) * page, total)


def _beat_forever(
    heartbeat: Heartbeat, proc: CoreProc, watchdog_seconds: float, read_memory: Callable[[], tuple[int, int]]
) -> None:
    """Write heartbeats; postpone the watchdog's deadline while the main loop makes progress.

    The watchdog itself is a C thread: it fires even when native code never releases the GIL.
    """
    watched = None
    while True:
        heartbeat.beat()
        heartbeat.device_memory(*read_memory())
        if watchdog_seconds > 0:
            mark = (proc.busy, heartbeat.num_steps)
            if not proc.busy:
                if watched is not None:
                    faulthandler.cancel_dump_traceback_later()
                    watched = None
            elif mark != watched:
                faulthandler.dump_traceback_later(watchdog_seconds, exit=True)
                watched = mark
        time.sleep(BEAT_SECONDS)


def main(socket_fd: int, files_fd: int, heartbeat_fd: int, num_ranks: int = 1, number: int = 0, *links: int) -> int:
    """Run the core on three inherited descriptors, the first of ``num_ranks`` here; returns the exit status.
    ``number``: of the core among several, to the others of which it has ``links``, see `LockStep`."""
    die_with_parent(os.getppid())  # elsewhere than on Linux the end of stdin has to suffice
    gc.disable()  # nothing imported or loaded is garbage, and collecting takes a sixth of the startup
    # The front end decides when this process stops: it drains on SIGTERM and then closes stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    started = time.perf_counter()
    channel, heartbeat = Channel(socket.socket(fileno=socket_fd)), Heartbeat(heartbeat_fd, create=False)
    for descriptor in (socket_fd, files_fd, heartbeat_fd, *links):  # a compiler started later must not hold them open
        os.set_inheritable(descriptor, False)
    local = RankProcesses(range(1, num_ranks), heartbeat_fd) if num_ranks > 1 else None
    # The slow imports (torch, by the worker) come before the configuration does.
    import msgspec

    from octavo.system.torch_import import import_torch

    try:
        import_torch()
    except OctavoError as error:
        return _fail(channel, error)
    import octavo.worker.worker  # noqa: F401
    from octavo.engine.core import EngineCore
    from octavo.interface.engine_config import EngineConfig
    from octavo.system.logging_setup import setup_logging

    gc.freeze()  # the modules: looking for garbage among 200,000 objects takes a tenth of a second
    imported = time.perf_counter()
    message = json.loads(read_line_from_stdin())
    options = CoreOptions(**message["options"])
    config = EngineConfig.from_dict(message["config"])
    name = options.name if config.parallel.world_size == 1 else f"{options.name} rank 0"
    setup_logging(options.log_level, options.log_format, process=name)
    logger.info("imports took %.2f s", imported - started)

    end = _End(channel)
    try:
        config, ranks = start_ranks(config, heartbeat_fd, local)
        if ranks is not None:
            ranks.on_lost = end.on_lost
        lock_step = _lock_step(number, links, config.parallel) if links else None
        core = EngineCore(config, ranks=ranks, lock_step=lock_step)
        if core.executor.num_blocks > 1:
            core.share_block_map(create_block_map(heartbeat_fd, core.executor.num_blocks - 1))
    except OctavoError as error:
        return _fail(channel, error)
    proc = CoreProc(core, channel, heartbeat, links, socket.socket(fileno=files_fd))
    # The model lives as long as the process: keep the collector from scanning it during a step.
    gc.collect()
    gc.freeze()
    gc.enable()
    beat_args = (heartbeat, proc, options.watchdog_seconds, _memory_reader(core.config.device))
    threading.Thread(target=_beat_forever, args=beat_args, name="heartbeat", daemon=True).start()
    heartbeat.beat()
    phases = {"import": imported - started, "load": time.perf_counter() - imported}
    ready = {
        "config": core.config.to_dict(),
        "num_blocks": core.executor.num_blocks,
        "blocks_of_longest": core.executor.kv_layout.most_blocks(core.config.scheduler.max_model_len),
        "kv_groups": len(core.executor.kv_layout.groups),
        "weight_bytes": core.executor.weight_bytes,
        "memory_shares": core.executor.memory_shares,
        "phases": phases,
    }
    end.is_ready = True
    channel.send(Kind.READY, msgspec.msgpack.encode(ready))
    proc.run()
    return 0


def _lock_step(number: int, links: Sequence[int], parallel: ParallelConfig) -> LockStep:
    from octavo.executor.lock_step import LockStep

    return LockStep(number, [socket.socket(fileno=link) for link in links], parallel)


class _End:
    """End this process when a rank is lost, whatever it is waiting for."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.is_ready = False

    def on_lost(self, reason: str) -> None:
        """End this process; the thread that watches the ranks calls this."""
        if not self.is_ready:
            time.sleep(1.0)  # what stopped that rank is about to stop this one, which tells it itself
            _fail(self._channel, OctavoError(reason))
        sys.stderr.flush()
        os._exit(1)


def _fail(channel: Channel, error: Exception) -> int:
    """Send the front end the reason why the engine cannot start; returns the exit status."""
    import msgspec

    channel.send(Kind.FAILED, msgspec.msgpack.encode(str(error)))
    channel.flush(2.0)
    return 1


if __name__ == "__main__":
    try:
        code = main(*map(int, sys.argv[1:]))
    except BaseException:
        logging.getLogger(__name__).exception("unexpected error in the engine core")
        code = 1
    # Neither threads nor sockets may keep the process alive.
    sys.stderr.flush()
    os._exit(code)
