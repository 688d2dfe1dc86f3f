"""The engine core as a process of its own: one loop that takes requests in, steps, and sends results out.

    python -m octavo.engine.core_proc DIRECTORY     (octavo.engine.launcher does this)

Configuration is one line of JSON on stdin. When stdin ends the parent has gone, and so do we. Messages are msgpack over
two unix sockets in DIRECTORY: no pickle, nothing that listens on a network.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.engine.heartbeat import Heartbeat
from octavo.engine.launcher import OUTPUT_SOCKET, REQUEST_SOCKET, CoreOptions

if TYPE_CHECKING:
    import zmq

    from octavo.engine.core import EngineCore

logger = logging.getLogger(__name__)

# Kinds of messages, the first frame of each. To the core:
ADD, ABORT, FINISH_SAMPLES = b"add", b"abort", b"finish_samples"
# From it:
READY, FAILED, OUTPUTS = b"ready", b"failed", b"outputs"

BEAT_SECONDS = 1.0
IDLE_SECONDS = 1  # without work, after which the engine checks its books,
CHECK_SECONDS = 30  # at most this often
_PR_SET_PDEATHSIG = 1


class CoreProc:
    """The busy loop. Blocks, using no CPU, while there is nothing to do."""

    def __init__(self, core: EngineCore, requests: zmq.Socket, outputs: zmq.Socket, heartbeat: Heartbeat) -> None:
        import msgspec

        from octavo.engine.messages import EngineCoreRequest

        self._core = core
        self._requests = requests
        self._outputs = outputs
        self._heartbeat = heartbeat
        self._decode_add = msgspec.msgpack.Decoder(EngineCoreRequest).decode
        self._decode_ids = msgspec.msgpack.Decoder(list[str]).decode
        self._decode_samples = msgspec.msgpack.Decoder(list[tuple[str, int]]).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self.busy = False
        self._checked = True  # nothing has been done yet
        self._last_check = time.monotonic()

    def run(self) -> None:
        import zmq

        from octavo.engine.messages import EngineCoreOutputs

        core = self._core
        while True:
            if not core.has_unfinished_requests():
                if self.busy:  # the last word on how many requests there are
                    self._send(OUTPUTS, EngineCoreOutputs(stats=core.scheduler.make_stats(), timestamp=time.time()))
                self.busy = False
                self._wait_for_work()
                self._heartbeat.progress(core.num_steps)
                self.busy = True
            while self._requests.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator, arg-type]
                self._handle(self._requests.recv_multipart())
            if core.has_unfinished_requests():
                num_steps = core.num_steps
                self._send(OUTPUTS, core.step())
                if core.num_steps > num_steps:
                    self._heartbeat.progress(core.num_steps)

    def _wait_for_work(self) -> None:
        """Blocks. An idle engine looks whether its books are in order: a fault is told, it is not fatal."""
        if not self._checked and not self._requests.poll(IDLE_SECONDS * 1000):
            self._checked = True
            try:
                self._core.check_integrity()
            except AssertionError:
                logger.exception("integrity check failed: please report this")
        self._requests.poll()
        if time.monotonic() - self._last_check > CHECK_SECONDS:
            self._checked, self._last_check = False, time.monotonic()

    def _send(self, kind: bytes, message: Any) -> None:
        self._outputs.send_multipart([kind, self._encode(message)])

    def _handle(self, frames: list[bytes]) -> None:
        """One message. Whatever goes wrong in it stays with the request that it is about."""
        kind, request_id, payload = frames
        try:
            if kind == ADD:
                self._core.add_request(self._decode_add(payload))
            elif kind == ABORT:
                self._core.abort_requests(self._decode_ids(payload))
            elif kind == FINISH_SAMPLES:
                for sample_of, index in self._decode_samples(payload):
                    self._core.finish_sample(sample_of, index)
            else:
                raise ValueError(f"unknown kind of message {kind!r}")
        except Exception as error:
            if kind != ADD:
                logger.exception("a message of kind %r could not be handled", kind)
                return
            if not isinstance(error, ValueError):
                logger.exception("request %s could not be added", request_id.decode())
            self._refuse(request_id.decode(), str(error))

    def _refuse(self, request_id: str, error: str) -> None:
        from octavo.engine.messages import EngineCoreOutput, EngineCoreOutputs

        # Index -1: the whole request, whatever its number of samples.
        output = EngineCoreOutput(request_id, -1, [], finish_reason="error", error=error)
        self._send(OUTPUTS, EngineCoreOutputs([output], timestamp=time.time()))


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill us when the parent goes, even if we are stopped or stuck."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):  # not Linux: the end of stdin has to do
        return
    if os.getppid() != parent:  # it went before we could ask
        os._exit(0)


def _exit_when_stdin_ends() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def _read_line_from_stdin() -> bytes:
    """Byte-exact: what follows the line is left for the thread that waits for the end."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 65536)
        if not chunk:
            os._exit(0)  # the parent gave up before it sent anything
        line += chunk
    return line


def _memory_reader(device: str) -> Callable[[], tuple[int, int]]:
    """Reads the bytes in use on the engine's device and all that there are for it."""
    if device == "cuda":
        import torch

        def read_cuda() -> tuple[int, int]:
            free, total = torch.cuda.mem_get_info()
            return total - free, total

        return read_cuda
    from octavo.platform import memory_limit

    page, statm, total = os.sysconf("SC_PAGE_SIZE"), Path("/proc/self/statm"), memory_limit()
    return lambda: (int(statm.read_text().split()[1]) * page, total)


def _beat(
    heartbeat: Heartbeat, proc: CoreProc, watchdog_seconds: float, read_memory: Callable[[], tuple[int, int]]
) -> None:
    """Show signs of life; keep pushing the watchdog's deadline back while the main loop makes progress.

    The watchdog itself is a C thread: it fires even when some native code never gives the interpreter's lock back.
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


def main(directory: Path) -> int:
    _die_with_parent(os.getppid())
    # The front end decides when we stop: it drains on SIGTERM and then closes our stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    started = time.perf_counter()
    # The slow imports (torch, by the worker) come before the configuration does.
    import msgspec
    import zmq

    from octavo.platform import import_torch_quickly

    import_torch_quickly()
    import octavo.worker.worker  # noqa: F401
    from octavo.config import EngineConfig
    from octavo.engine.core import EngineCore
    from octavo.errors import OctavoError
    from octavo.logs import setup_logging

    imported = time.perf_counter()
    message = json.loads(_read_line_from_stdin())
    threading.Thread(target=_exit_when_stdin_ends, name="parent-watch", daemon=True).start()
    options = CoreOptions(**message["options"])
    setup_logging(options.log_level, options.log_format, process="core")
    logger.info("imports took %.2f s", imported - started)

    context = zmq.Context(io_threads=1)
    outputs = context.socket(zmq.PUSH)
    outputs.set_hwm(0)
    outputs.connect(f"ipc://{directory / OUTPUT_SOCKET}")
    requests = context.socket(zmq.PULL)
    requests.set_hwm(0)
    requests.connect(f"ipc://{directory / REQUEST_SOCKET}")
    heartbeat = Heartbeat(directory, create=False)
    try:
        core = EngineCore(EngineConfig.from_dict(message["config"]))
    except OctavoError as error:
        outputs.send_multipart([FAILED, msgspec.msgpack.encode(str(error))])
        context.destroy(linger=2000)  # waits until it is sent
        return 1
    proc = CoreProc(core, requests, outputs, heartbeat)
    # Modules and weights live as long as we do: the collector need not look at them again in the middle of a step.
    gc.collect()
    gc.freeze()
    beat_args = (heartbeat, proc, options.watchdog_seconds, _memory_reader(core.config.device))
    threading.Thread(target=_beat, args=beat_args, name="heartbeat", daemon=True).start()
    heartbeat.beat()
    phases = {"import": imported - started, "load": time.perf_counter() - imported}
    proc._send(READY, {"config": core.config.to_dict(), "num_blocks": core.executor.num_blocks, "phases": phases})
    proc.run()
    return 0


if __name__ == "__main__":
    try:
        code = main(Path(sys.argv[1]))
    except BaseException:
        logging.getLogger(__name__).exception("the engine core ends by an unexpected error")
        code = 1
    # Neither waiting threads nor sockets may keep a core that has ended.
    sys.stderr.flush()
    os._exit(code)
