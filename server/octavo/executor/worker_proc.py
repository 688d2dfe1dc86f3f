"""The process of a rank beside the first of a machine: it computes the same steps with its part of the model.

    python -m octavo.executor.worker_proc RANK SOCKET HEARTBEATS INDEX     (octavo.executor.rank_processes does this)

Configuration is one line of JSON on stdin, whose end means that the parent has exited: so does this process. Steps come
as msgpack over the inherited SOCKET. It samples every token itself, as rank 0 does, and returns none; of a pipeline the
last stage samples, and its first rank returns what it has sampled.
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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.errors import OctavoError
from octavo.system.channel import Channel, Kind
from octavo.system.heartbeat import Heartbeat
from octavo.system.parent import die_with_parent, read_line_from_stdin

if TYPE_CHECKING:
    from octavo.executor.places import Place
    from octavo.executor.ranks import Ranks
    from octavo.interface.step import PendingOutput
    from octavo.worker.worker import Worker

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.5


class Inbox:
    """Messages from rank 0: steps, the bitmasks used in them, and adapters to read."""

    load_adapter: Callable[[bytearray], object] | None = None  # called with each as soon as it is found

    def __init__(self, channel: Channel, forward: Callable[[Kind, bytes], None] | None = None) -> None:
        """``forward``: called with everything that comes, for the other ranks of this machine."""
        self._channel, self._forward = channel, forward
        self._waiting: dict[Kind, deque[bytearray]] = {Kind.STEP: deque(), Kind.MASK: deque()}

    def next_of(self, kind: Kind, until: Callable[[], bool] | None = None) -> bytearray | None:
        """The next of one kind; None if ``until`` is true before that comes. Raises EOFError once rank 0 has ended."""
        queue = self._waiting[kind]
        while not queue:
            for found, payload in self._channel.receive():
                if self._forward is not None:
                    self._forward(found, bytes(payload))
                if found is Kind.LOAD_ADAPTER:
                    assert self.load_adapter is not None
                    self.load_adapter(payload)
                else:
                    self._waiting[found].append(payload)
            if queue or (until is not None and until()):
                break
            if until is None:
                self._channel.wait()
            else:
                self._channel.wait_unless(until)
        return queue.popleft() if queue else None

    def wait_for_group(self) -> None:
        """Wait until node 0 has all nodes. Raises EOFError, and OctavoError where it refuses this one."""
        while True:
            for kind, _ in self._channel.receive():
                if kind is Kind.FAILED:
                    raise OctavoError(
                        "node 0 has another configuration: give the same model, flags and version on every node"
                    )
                return
            self._channel.wait()

    def next_mask(self) -> bytearray:
        """The next bitmask."""
        mask = self.next_of(Kind.MASK)
        assert mask is not None
        return mask


class _InFlight(NamedTuple):
    """A step that is launched; ``drafted``: sequences with drafts of the host in it."""

    pending: PendingOutput
    is_done: Callable[[], bool]
    drafted: frozenset[str]


def run(
    worker: Worker, place: Place, channel: Channel, inbox: Inbox, heartbeat: Heartbeat, others: Ranks | None = None
) -> None:
    """Compute steps until rank 0 has ended. ``others``: of this machine, whose sums of tokens are compared here."""
    import msgspec

    from octavo.executor.ranks import send_results
    from octavo.executor.token_sums import TokenSum
    from octavo.interface.lora import Adapter
    from octavo.interface.step import SchedulerOutput

    decode, encode = msgspec.msgpack.Decoder(SchedulerOutput).decode, msgspec.msgpack.Encoder().encode
    if worker.adapters is not None:
        decode_adapter, adapters = msgspec.msgpack.Decoder(Adapter).decode, worker.adapters
        inbox.load_adapter = lambda payload: adapters.load(decode_adapter(payload))
    in_flight: deque[_InFlight] = deque()
    total, stage = TokenSum(place.rank), place.tp.stage
    tells = stage.is_last and not stage.is_first and place.tp.rank == 0
    from_host = not worker.config.speculative.in_worker  # drafts

    def take() -> None:
        """Take the oldest step's results."""
        output = in_flight.popleft().pending()
        place.check()
        if tells:
            send_results(channel, encode(output))
        if total.add(output) and stage.is_last:
            if not tells:
                channel.send(Kind.SUM, encode((total.num_steps, total.value)))
            if others is not None:
                total.compare(others.sums())
        heartbeat.progress(total.num_steps)

    while True:
        # Whoever waits for a step's results cannot launch the next one, for which the device would wait then.
        payload = inbox.next_of(Kind.STEP, until=in_flight[0].is_done if in_flight else None)
        if payload is None:
            take()
            continue
        step = decode(payload)
        # Rank 0 had those of drafts before it went on with their sequences: how many hold decides where these go on.
        while any(not each.drafted.isdisjoint(step.num_scheduled_tokens) for each in in_flight):
            take()
        pending, drafted = worker.execute_model(step), step.scheduled_spec_decode_tokens if from_host else ()
        in_flight.append(_InFlight(pending, worker.when_done(), frozenset(drafted)))
        if len(in_flight) >= worker.max_in_flight:
            take()


def _beat_forever(heartbeat: Heartbeat) -> None:
    while True:
        heartbeat.beat()
        time.sleep(BEAT_SECONDS)


def main(rank: int, socket_fd: int, heartbeats: int, index: int) -> int:
    """Run a rank on two inherited descriptors; returns the exit status."""
    die_with_parent(os.getppid())
    gc.disable()  # nothing imported or loaded is garbage
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when this process ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    sock, heartbeat = socket.socket(fileno=socket_fd), Heartbeat(heartbeats, create=False, rank=index)
    for descriptor in (socket_fd, heartbeats):
        os.set_inheritable(descriptor, False)
    threading.Thread(target=_beat_forever, args=(heartbeat,), name="heartbeat", daemon=True).start()
    try:
        _serve(rank, sock, heartbeat)
    except (EOFError, ConnectionError):
        return 0  # rank 0 has ended
    except OctavoError as error:
        heartbeat.fail(str(error))
    except BaseException as error:
        logger.exception("rank %d ends", rank)
        heartbeat.fail(f"rank {rank} (process {os.getpid()}) failed: {error}")
    return 1


def _serve(rank: int, sock: socket.socket, heartbeat: Heartbeat) -> None:
    from octavo.system.torch_import import import_torch

    import_torch()  # the slow imports come before the configuration does
    import octavo.worker.worker

    gc.freeze()
    message: dict[str, Any] = json.loads(read_line_from_stdin())
    from octavo.executor.places import device_place, local_place
    from octavo.executor.remote import serve
    from octavo.interface.engine_config import EngineConfig
    from octavo.system.logging_setup import setup_logging
    from octavo.worker.grammars.shared_masks import FollowingGrammars
    from octavo.worker.stage import Pipes

    setup_logging(message["level"], message["log_format"], process=f"rank {rank}")
    config = EngineConfig.from_dict(message["config"])
    if config.parallel.world_size == 1:
        return serve(config, Channel(sock), heartbeat)
    if message["folder"] is None:
        _, descriptors, _, _ = socket.recv_fds(sock, 1, 6)
        place = local_place(config.parallel, rank, descriptors)
    else:
        place = device_place(config, rank, Path(message["folder"]))
    channel = Channel(sock)
    inbox = Inbox(channel)
    worker = octavo.worker.worker.Worker(
        config,
        tp=place.tp,
        agree=place.world.smallest,
        make_grammars=lambda _, vocab_size: FollowingGrammars(vocab_size, inbox.next_mask),
        pipes=Pipes(place.before, place.after),
    )
    gc.collect()
    gc.freeze()
    gc.enable()
    channel.send(Kind.READY, b"")
    run(worker, place, channel, inbox, heartbeat)


if __name__ == "__main__":
    try:
        code = main(*map(int, sys.argv[1:]))
    finally:
        sys.stderr.flush()
    os._exit(code)  # neither threads nor sockets may keep the process alive
