"""The ranks of an engine on other nodes, for which node 0 waits. `octavo.executor.headless` is their side."""

from __future__ import annotations

import hashlib
import json
import logging
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

from octavo.errors import ConfigError
from octavo.executor.rank_processes import RankProcesses
from octavo.executor.ranks import WATCH_SECONDS, Ranks, Watched
from octavo.executor.tls_channel import ROLES, Greeted, TlsChannel, accept, cluster_token
from octavo.interface.engine_config import EngineConfig
from octavo.system.channel import Channel, Kind
from octavo.system.heartbeat import Heartbeat
from octavo.system.temporary import temporary_file

if TYPE_CHECKING:
    from octavo.executor.places import Place

logger = logging.getLogger(__name__)

_BEAT_IS_FRESH = 1.6  # seconds; a rank beats twice a second
_SILENT_SECONDS = 6.0  # without a beat, after which a node is lost
_MOST_HANDSHAKES = 16  # at the same time


def fingerprint(config: EngineConfig) -> str:
    """A hash of what all nodes must have alike: everything but where files are."""
    data = asdict(config)
    del data["parallel"]["node_rank"], data["parallel"]["master_addr"], data["parallel"]["master_port"]
    for model in (data["model"], data["speculative"]["draft"] or {}):
        for name in ("model", "files", "generation_config"):
            model.pop(name, None)
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()


def pack_beats(pages: Sequence[Heartbeat]) -> bytes:
    """Encode the beats of a node's ranks: the steps that each has done, -1 if it does not beat; then why the node
    ends."""
    steps = [page.num_steps if page.seconds_since_beat() < _BEAT_IS_FRESH else -1 for page in pages]
    return struct.pack(f"<{len(steps)}q", *steps) + pages[0].failure.encode()


def take_beats(payload: bytes | bytearray, pages: Sequence[Heartbeat]) -> str:
    """Bring the ``pages`` of a node's ranks up to date; returns why it ends, "" if it does not."""
    for page, steps in zip(pages, struct.unpack_from(f"<{len(pages)}q", payload), strict=True):
        if steps >= 0:
            page.beat()
            page.progress(steps)
    return payload[8 * len(pages) :].decode(errors="replace")


@dataclass
class NodeRank:
    """The ranks of a node, see `octavo.executor.ranks.Rank`."""

    node: int
    number: int
    channel: Channel
    tensors: Channel
    beats: Channel
    heartbeats: list[Heartbeat]

    @property
    def name(self) -> str:
        """The name in errors."""
        return self.watched[0].name

    @property
    def watched(self) -> list[Watched]:
        """See `Rank`."""
        return [
            Watched(rank, f"rank {rank} (node {self.node})", page)
            for rank, page in enumerate(self.heartbeats, self.number)
        ]

    def ended(self) -> tuple[int, str] | None:
        """See `Rank`. Reads its beats."""
        try:
            for _, payload in self.beats.receive():
                if failure := take_beats(payload, self.heartbeats):
                    return 0, failure
        except EOFError:
            return 1, f"{self.name} has closed its connection"
        silent = self.heartbeats[0].seconds_since_beat()
        return (0, f"{self.name} has been silent for {silent:.0f} s") if silent > _SILENT_SECONDS else None

    def end(self) -> None:
        """Close its connections: then it ends."""
        for channel in (self.channel, self.tensors, self.beats):
            channel.close()

    close = end


class Placement(Protocol):
    """Whoever starts the other nodes; see `octavo.executor.ray_placement.Placement`."""

    token: str
    problem: str | None

    def place(self) -> None:
        """Start them."""

    def close(self) -> None:
        """End them."""


class NodeRanks(Ranks):
    """The ranks on other nodes, and those beside rank 0. Listens at the configured address until all have come."""

    def __init__(
        self,
        config: EngineConfig,
        heartbeats: int | None = None,
        local: RankProcesses | None = None,
        placement: Placement | None = None,
    ) -> None:
        """``heartbeats``: see `RankProcesses`; ``local``: beside rank 0, if there are any; ``placement``: starts the
        other nodes. Raises ConfigError where the token is missing, the port is taken, or Ray cannot start a node."""
        super().__init__(config.parallel.world_size)
        self._num_nodes, self._local = config.parallel.nnodes, local
        self._placement = placement
        self._token = placement.token.encode() if placement is not None else cluster_token()
        self._fingerprint = fingerprint(config)
        self._address = config.parallel.master_addr, config.parallel.master_port
        self._joined: dict[tuple[int, str], TlsChannel] = {}
        self._has_said: set[int] = set()  # ranks whose configuration is as here
        self._handshakes: SimpleQueue[Greeted | None] = SimpleQueue()
        if heartbeats is None:
            with temporary_file() as file:
                Heartbeat(file.fileno(), create=True)
                self._pages = self._heartbeats(file.fileno())
        else:
            self._pages = self._heartbeats(heartbeats)
        try:
            self._listener = socket.create_server(self._address)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self._address[0]}:{self._address[1]} ({error.strerror or error}); choose another "
                "master_port, and as master_addr an address of this machine"
            ) from None
        self._start_thread()

    def _heartbeats(self, descriptor: int) -> list[Heartbeat]:
        return [Heartbeat(descriptor, create=False, rank=rank) for rank in range(1, self.size)]

    def _start(self) -> None:
        logger.info("waiting for %d other nodes at %s:%d", self._num_nodes - 1, *self._address)
        if self._placement is not None:
            self._placement.place()
        with self._listener:
            self._wait_for_nodes()
        if self._local is not None:
            self._ranks += self._local.hand_over()
        per_node = self.size // self._num_nodes
        for node in range(1, self._num_nodes):
            first = node * per_node
            pages = self._pages[first - 1 : first - 1 + per_node]
            for page in pages:
                page.beat()
            control, tensors, beats = (self._joined[node, role] for role in ROLES)
            self._ranks.append(NodeRank(node, first, control, tensors, beats, pages))
            control.send(Kind.JOIN, b"")

    def _wait_for_nodes(self) -> None:
        self._listener.settimeout(WATCH_SECONDS)
        running, told = 0, 0
        while len(self._has_said) < self._num_nodes - 1:
            if self._placement is not None and self._placement.problem is not None:
                raise ConfigError(self._placement.problem)
            with suppress(TimeoutError):
                sock, _ = self._listener.accept()
                if running < _MOST_HANDSHAKES:
                    running += 1
                    threading.Thread(target=self._shake_hands, args=(sock,), daemon=True).start()
                else:
                    sock.close()
            for greeted in self._finished():
                running -= 1
                if greeted is not None:
                    self._joined[greeted.node, greeted.role] = greeted.channel
            self._read_joined()
            if len(self._has_said) > told:
                told = len(self._has_said)
                logger.info("%d of %d other nodes have come", told, self._num_nodes - 1)

    def _shake_hands(self, sock: socket.socket) -> None:
        wanted = {(node, role) for node in range(1, self._num_nodes) for role in ROLES} - set(self._joined)
        self._handshakes.put(accept(sock, self._token, wanted))

    def _finished(self) -> Iterator[Greeted | None]:
        while True:
            try:
                yield self._handshakes.get_nowait()
            except Empty:
                return

    def _read_joined(self) -> None:
        """Hear which nodes are configured as this one, and forget those that have gone."""
        for (node, role), channel in list(self._joined.items()):
            try:
                for kind, payload in channel.receive():
                    if kind is Kind.JOIN and payload.decode() == self._fingerprint:
                        self._has_said.add(node)
                    elif kind is Kind.JOIN:
                        logger.error("node %d has another configuration, and was refused", node)
                        channel.send(Kind.FAILED, b"")
                        channel.flush(1.0)
                        raise EOFError
            except EOFError:
                for other in ROLES:
                    if (gone := self._joined.pop((node, other), None)) is not None:
                        gone.close()
                self._has_said.discard(node)
                del role

    def open_place(self, config: EngineConfig) -> Place:
        """See `Ranks`."""
        from octavo.executor.places import place_of_node

        channels = [self._joined[node, "tensors"] for node in range(1, self._num_nodes)]
        shared = None if self._local is None else self._local.share_memory(config)
        return place_of_node(config.parallel, 0, channels, shared)

    def close(self) -> None:
        """See `Ranks`."""
        super().close()
        for started in (self._local, self._placement):
            if started is not None:
                started.close()
