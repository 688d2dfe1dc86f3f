"""A node of an engine beside node 0: its ranks take part until that ends, and it says how they are meanwhile."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from functools import partial

from octavo.errors import OctavoError
from octavo.executor.nodes import fingerprint, pack_beats
from octavo.executor.rank_processes import RankProcesses
from octavo.executor.tls_channel import ROLES, RefusedError, TlsChannel, cluster_token, connect
from octavo.interface.engine_config import EngineConfig
from octavo.system.channel import Kind
from octavo.system.heartbeat import Heartbeat
from octavo.system.temporary import temporary_file

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
FROZEN_SECONDS = 5.0  # without a beat, after which a rank is not alive
_CONNECT_SECONDS = 600.0  # that a node waits for node 0


class NodeState:
    """The progress of a node; probes read it in another thread."""

    def __init__(self) -> None:
        self.waits: str | None = "it looks for the model"  # why its ranks take no steps; None: they do
        self.heartbeats: list[Heartbeat] = []  # of its ranks, once they are to beat
        self.has_ended = False  # node 0 has, or a rank

    def why_not_alive(self) -> str | None:
        """Return why the liveness probe fails; None if it does not, or while the node waits."""
        if self.has_ended:
            return self.waits
        silent = max((beat.seconds_since_beat() for beat in self.heartbeats), default=0.0)
        return f"a rank has been frozen for {silent:.0f} s: no heartbeat" if silent > FROZEN_SECONDS else None

    def why_not_ready(self) -> str | None:
        """Return why the readiness probe fails; None if it does not."""
        return None if self.waits is None else f"the node serves no engine: {self.waits}"

    def end(self, reason: str) -> None:
        """Note that the node will never be ready again."""
        self.has_ended, self.waits = True, reason


def run_headless(config: EngineConfig, state: NodeState) -> None:
    """Be one or several ranks of node 0's engine until that ends. Raises OctavoError."""
    parallel = config.parallel
    first, count = parallel.node_rank * parallel.ranks_per_node, parallel.ranks_per_node
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    with temporary_file() as file:
        pages = [Heartbeat(file.fileno(), create=i == 0, rank=i) for i in range(count)]
        local = RankProcesses(range(first + 1, first + count), file.fileno()) if count > 1 else None
    if local is not None:
        local.on_lost = partial(_end, pages[0], state)
    try:
        _join(config, state, pages, local)
    except (EOFError, RuntimeError) as error:
        if local is not None:
            local.wait_for_news()
        reason = local.lost if local is not None and local.lost else str(error)
        _tell(pages[0], state, f"rank {first} (node {parallel.node_rank}) failed: {reason}")
        raise OctavoError(f"the engine of node 0 has ended: {reason}") from error
    except OctavoError as error:
        _tell(pages[0], state, f"rank {first} (node {parallel.node_rank}): {error}")
        raise
    finally:
        if local is not None:
            local.close()


def _join(config: EngineConfig, state: NodeState, pages: list[Heartbeat], local: RankProcesses | None) -> None:
    from octavo.executor.worker_proc import Inbox, run
    from octavo.system.torch_import import import_torch
    from octavo.worker.grammars.shared_masks import FollowingGrammars
    from octavo.worker.stage import Pipes

    parallel, token = config.parallel, cluster_token()
    node, address = parallel.node_rank, (parallel.master_addr, parallel.master_port)
    state.waits = f"node 0 does not answer yet at {address[0]}:{address[1]}"
    control = _connect(address, token, node, "control", _CONNECT_SECONDS)
    tensors, beats = (_connect(address, token, node, role, 10.0) for role in ROLES[1:])
    inbox = Inbox(control, local.send if local is not None else None)
    control.send(Kind.JOIN, fingerprint(config).encode())
    import_torch()
    from octavo.executor.places import place_of_node
    from octavo.worker.worker import Worker

    state.waits = "other nodes have not come yet"
    inbox.wait_for_group()
    state.waits = "it loads its part of the model"
    threading.Thread(target=_beat_forever, args=(beats, pages), name="heartbeat", daemon=True).start()
    if local is not None:
        local.timeout = parallel.distributed_timeout_seconds
    place = place_of_node(parallel, node, [tensors], None if local is None else local.share_memory(config))
    if local is not None:
        local.place = place
        local.check()
    worker = Worker(
        config,
        tp=place.tp,
        agree=place.world.smallest,
        make_grammars=lambda _, vocab_size: FollowingGrammars(vocab_size, inbox.next_mask),
        pipes=Pipes(place.before, place.after),
    )
    if local is not None:
        local.wait_ready()
    control.send(Kind.READY, b"")
    state.heartbeats, state.waits = pages, None
    logger.info("node %d is ready", node)
    run(worker, place, control, inbox, pages[0], local)


def _connect(address: tuple[str, int], token: bytes, node: int, role: str, seconds: float) -> TlsChannel:
    try:
        return connect(address, token, node, role, seconds)
    except ConnectionError as error:
        raise RefusedError(str(error)) from None


def _beat_forever(beats: TlsChannel, pages: list[Heartbeat]) -> None:
    while True:
        pages[0].beat()
        beats.send(Kind.BEAT, pack_beats(pages))
        time.sleep(BEAT_SECONDS)


def _tell(page: Heartbeat, state: NodeState, reason: str) -> None:
    """Tell probes and node 0 why this node ends."""
    state.end(reason)
    page.fail(reason)
    time.sleep(2 * BEAT_SECONDS)  # for the last beat


def _end(page: Heartbeat, state: NodeState, reason: str) -> None:
    """End this process, whatever it waits for; called by the thread that watches its other ranks."""
    _tell(page, state, reason)
    print(f"octavo: error: {reason}", file=sys.stderr, flush=True)
    os._exit(1)
