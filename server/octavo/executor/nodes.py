"""The ranks of an engine on other nodes, one on each: node 0 waits for them. Their side: `octavo.executor.headless`."""

from __future__ import annotations

import hashlib
import json
import logging
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.executor.ranks import WATCH_SECONDS, Ranks
from octavo.executor.signed_channel import ROLES, Greeted, SignedChannel, accept, cluster_token
from octavo.interface.engine_config import EngineConfig
from octavo.system.channel import Channel, Kind
from octavo.system.heartbeat import Heartbeat

if TYPE_CHECKING:
    from octavo.executor.places import Place

logger = logging.getLogger(__name__)

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


@dataclass
class NodeRank:
    """One of them, see `octavo.executor.ranks.Rank`."""

    number: int
    channel: Channel
    tensors: Channel
    beats: Channel
    heartbeat: Heartbeat

    @property
    def name(self) -> str:
        """As errors call it."""
        return f"rank {self.number} (node {self.number})"

    def ended(self) -> tuple[int, str] | None:
        """See `Rank`. Reads its beats."""
        try:
            for _, payload in self.beats.receive():
                self.heartbeat.beat()
                self.heartbeat.progress(int.from_bytes(payload[:8], "little"))
                if len(payload) > 8:
                    return 0, payload[8:].decode(errors="replace")
        except EOFError:
            return 1, f"{self.name} has closed its connection"
        silent = self.heartbeat.seconds_since_beat()
        return (0, f"{self.name} has been silent for {silent:.0f} s") if silent > _SILENT_SECONDS else None

    def end(self) -> None:
        """Close its connections: then it ends."""
        for channel in (self.channel, self.tensors, self.beats):
            channel.close()

    close = end


class NodeRanks(Ranks):
    """The ranks on other nodes. Listens at the configured address until all have come."""

    def __init__(self, config: EngineConfig, heartbeats: int | None = None) -> None:
        """``heartbeats``: see `RankProcesses`. Raises ConfigError where the token is missing or the port is taken."""
        super().__init__(config.parallel.world_size)
        self._token, self._fingerprint = cluster_token(), fingerprint(config)
        self._address = config.parallel.master_addr, config.parallel.master_port
        self._joined: dict[tuple[int, str], SignedChannel] = {}
        self._has_said: set[int] = set()  # ranks whose configuration is as here
        self._handshakes: SimpleQueue[Greeted | None] = SimpleQueue()
        if heartbeats is None:
            with tempfile.TemporaryFile() as file:
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
        logger.info("waiting for %d other nodes at %s:%d", self.size - 1, *self._address)
        self._listener.settimeout(WATCH_SECONDS)
        running, told = 0, 0
        with self._listener:
            while len(self._has_said) < self.size - 1:
                try:
                    sock, _ = self._listener.accept()
                except TimeoutError:
                    pass
                else:
                    if running < _MOST_HANDSHAKES:
                        running += 1
                        threading.Thread(target=self._shake_hands, args=(sock,), daemon=True).start()
                    else:
                        sock.close()
                for greeted in self._finished():
                    running -= 1
                    if greeted is not None:
                        self._joined[greeted.rank, greeted.role] = greeted.channel
                self._read_joined()
                if len(self._has_said) > told:
                    told = len(self._has_said)
                    logger.info("%d of %d other nodes have come", told, self.size - 1)
        for rank, page in zip(range(1, self.size), self._pages, strict=True):
            page.beat()
            control, tensors, beats = (self._joined[rank, role] for role in ROLES)
            self._ranks.append(NodeRank(rank, control, tensors, beats, page))
            control.send(Kind.JOIN, b"")

    def _shake_hands(self, sock: socket.socket) -> None:
        wanted = {(rank, role) for rank in range(1, self.size) for role in ROLES} - set(self._joined)
        self._handshakes.put(accept(sock, self._token, wanted))

    def _finished(self) -> Iterator[Greeted | None]:
        while True:
            try:
                yield self._handshakes.get_nowait()
            except Empty:
                return

    def _read_joined(self) -> None:
        """Hear which nodes are configured as this one, and forget those that have gone."""
        for (rank, role), channel in list(self._joined.items()):
            try:
                for kind, payload in channel.receive():
                    if kind is Kind.JOIN and payload.decode() == self._fingerprint:
                        self._has_said.add(rank)
                    elif kind is Kind.JOIN:
                        logger.error("rank %d has another configuration, and was refused", rank)
                        channel.send(Kind.FAILED, b"")
                        channel.flush(1.0)
                        raise EOFError
            except EOFError:
                for other in ROLES:
                    if (gone := self._joined.pop((rank, other), None)) is not None:
                        gone.close()
                self._has_said.discard(rank)
                del role

    def open_place(self, config: EngineConfig) -> Place:
        """See `Ranks`."""
        from octavo.executor.places import place_of_node

        return place_of_node(config.parallel, 0, [self._joined[rank, "tensors"] for rank in range(1, self.size)])
