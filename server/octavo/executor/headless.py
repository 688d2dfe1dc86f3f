"""A node of an engine beside node 0: it joins node 0, is a rank of it until that ends, and says how it is meanwhile."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
import time

from octavo.errors import OctavoError
from octavo.executor.nodes import fingerprint
from octavo.executor.signed_channel import ROLES, RefusedError, SignedChannel, cluster_token, connect
from octavo.interface.engine_config import EngineConfig
from octavo.system.channel import Kind
from octavo.system.heartbeat import Heartbeat

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
FROZEN_SECONDS = 5.0  # without a beat, after which a rank is not alive
_CONNECT_SECONDS = 600.0  # that a node waits for node 0


class NodeState:
    """How far a node is; probes read it in another thread."""

    def __init__(self) -> None:
        self.waits: str | None = "it looks for the model"  # why its rank takes no steps; None: it does
        self.heartbeats: list[Heartbeat] = []  # of its ranks, once they are to beat
        self.has_ended = False  # node 0 has, or a rank

    def why_not_alive(self) -> str | None:
        """Why the liveness probe fails; None if it does not, or while the node waits."""
        if self.has_ended:
            return self.waits
        silent = max((beat.seconds_since_beat() for beat in self.heartbeats), default=0.0)
        return f"a rank has been frozen for {silent:.0f} s: no heartbeat" if silent > FROZEN_SECONDS else None

    def why_not_ready(self) -> str | None:
        """Why the readiness probe fails; None if it does not."""
        return None if self.waits is None else f"the node serves no engine: {self.waits}"

    def end(self, reason: str) -> None:
        """It will never be ready any more."""
        self.has_ended, self.waits = True, reason


def run_headless(config: EngineConfig, state: NodeState) -> None:
    """Be a rank of node 0's engine until that ends. Raises OctavoError."""
    from octavo.executor.worker_proc import Inbox, run
    from octavo.system.torch_import import import_torch
    from octavo.worker.shared_masks import FollowingGrammars
    from octavo.worker.stage import Pipes

    parallel, token = config.parallel, cluster_token()
    rank, address = parallel.node_rank, (parallel.master_addr, parallel.master_port)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    state.waits = f"node 0 does not answer yet at {address[0]}:{address[1]}"
    control = _connect(address, token, rank, "control", _CONNECT_SECONDS)
    tensors, beats = (_connect(address, token, rank, role, 10.0) for role in ROLES[1:])
    inbox = Inbox(control)
    control.send(Kind.JOIN, fingerprint(config).encode())
    import_torch()
    from octavo.executor.places import place_of_node
    from octavo.worker.worker import Worker

    with tempfile.TemporaryFile() as file:
        heartbeat = Heartbeat(file.fileno(), create=True)
    try:
        state.waits = "other nodes have not come yet"
        inbox.wait_for_group()
        state.waits = "it loads its part of the model"
        heartbeat.beat()
        state.heartbeats = [heartbeat]
        args = (beats, heartbeat)
        threading.Thread(target=_beat_forever, args=args, name="heartbeat", daemon=True).start()
        place = place_of_node(parallel, rank, [tensors])
        worker = Worker(
            config,
            tp=place.tp,
            agree=place.world.smallest,
            make_grammars=lambda _, vocab_size: FollowingGrammars(vocab_size, inbox.next_mask),
            pipes=Pipes(place.before, place.after),
        )
        logger.info("rank %d is ready", rank)
        control.send(Kind.READY, b"")
        state.waits = None
        run(worker, place, control, inbox, heartbeat)
    except (EOFError, RuntimeError) as error:
        state.end(f"the engine of node 0 has ended: {error}")
        heartbeat.fail(f"rank {rank} (node {rank}) failed: {error}")
        time.sleep(2 * BEAT_SECONDS)  # for the last beat, which tells why
        raise OctavoError(f"the engine of node 0 has ended: {error}") from error
    except OctavoError as error:
        state.end(str(error))
        heartbeat.fail(f"rank {rank} (node {rank}): {error}")
        time.sleep(2 * BEAT_SECONDS)
        raise


def _connect(address: tuple[str, int], token: bytes, rank: int, role: str, seconds: float) -> SignedChannel:
    try:
        return connect(address, token, rank, role, seconds)
    except ConnectionError as error:
        raise RefusedError(str(error)) from None


def _beat_forever(beats: SignedChannel, heartbeat: Heartbeat) -> None:
    while True:
        heartbeat.beat()
        beats.send(Kind.BEAT, heartbeat.num_steps.to_bytes(8, "little") + heartbeat.failure.encode())
        time.sleep(BEAT_SECONDS)
