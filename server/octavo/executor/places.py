"""Where a rank stands among the others, and by what it exchanges tensors with which of them."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.executor.channel_group import ChannelGroup
from octavo.executor.node_group import NodeGroup
from octavo.executor.signed_channel import SignedChannel
from octavo.executor.stage_links import ChannelLink, MemoryLink
from octavo.interface.engine_config import EngineConfig, ParallelConfig
from octavo.layers.parallel import Group, SharedMemoryGroup, TensorParallel
from octavo.worker.stage import StageLink
from octavo_kernels.cpu import create_shared_memory

_START_SECONDS = 600.0  # that stages wait for one another at start


@dataclass(frozen=True)
class Place:
    """Of one rank. ``world``: all ranks, who agree on what they start with."""

    rank: int
    world: Group
    tp: TensorParallel
    before: StageLink | None = None
    after: StageLink | None = None

    def check(self) -> None:
        """See `Group`; of the ranks of the same stage."""
        if self.tp.group is not None:
            self.tp.group.check()

    def stop(self) -> None:
        """Have no rank wait for another any more; to be called from any thread."""
        for group in {id(group): group for group in (self.world, self.tp.group) if group is not None}.values():
            group.stop()

    @property
    def late(self) -> list[int]:
        """Ranks of the same stage that others are known to wait for."""
        first = self.rank - self.tp.rank
        return [first + rank for rank in self.tp.group.late] if self.tp.group is not None else []


def create_memory(parallel: ParallelConfig, has_cores: bool) -> list[list[int]]:
    """The descriptors that each rank of one machine makes its `Place` of: memory that all ranks have; of several stages
    also that of its own, then a socket and memory for the link with the stage before and with the stage after."""
    ranks, timeout = parallel.tensor_parallel_size, parallel.distributed_timeout_seconds
    if parallel.nnodes > 1:
        ranks = parallel.ranks_per_node
    if parallel.pipeline_parallel_size == 1:
        return [[one] for one in _copies(create_shared_memory(ranks, timeout, has_cores), ranks)]
    size = parallel.world_size
    found = [[one] for one in _copies(create_shared_memory(size, _START_SECONDS, has_cores), size)]
    for first in range(0, size, ranks):
        own = create_shared_memory(ranks, timeout, has_cores)
        for rank, one in enumerate(_copies(own, ranks), first):
            found[rank].append(one)
    for rank in range(size - ranks):
        for end, one, memory in zip(socket.socketpair(), (rank, rank + ranks), _copies(_memory_file(), 2), strict=True):
            found[one] += [end.detach(), memory]
    return found


def local_place(parallel: ParallelConfig, rank: int, descriptors: Sequence[int]) -> Place:
    """That of a rank among others of one machine, of what `create_memory` has made for it; takes the descriptors."""
    (stage, within), ranks = parallel.place_of(rank), parallel.tensor_parallel_size
    (world, *rest), dealt = descriptors, parallel.enable_expert_parallel
    if parallel.nnodes > 1:
        return _place_on_node(parallel, rank, world, None)
    group = _open(world, rank, parallel.world_size)
    if stage.size == 1:
        return Place(rank, group, TensorParallel(within, ranks, group, expert_parallel=dealt))
    own, *links = rest
    found: list[MemoryLink] = []
    for other, exists in ((rank - ranks, not stage.is_first), (rank + ranks, not stage.is_last)):
        if exists:
            end, memory, *links = links
            found.append(MemoryLink(socket.socket(fileno=end), memory, stage.size, other))
    of_stage = _open(own, within, ranks, rank - within)
    return Place(
        rank, group, TensorParallel(within, ranks, of_stage, stage, dealt),
        None if stage.is_first else found[0], None if stage.is_last else found[-1],
    )  # fmt: skip


def device_place(config: EngineConfig, rank: int, folder: Path, check: Callable[[], None] = lambda: None) -> Place:
    """That of a rank with a GPU of its own; see `open_device_group`."""
    from octavo.executor.device_groups import open_device_group  # not before: with CPUs there may be no Triton

    group = open_device_group(config, rank, folder, check)
    return Place(rank, group, TensorParallel(rank, config.parallel.tensor_parallel_size, group))


def place_of_node(
    parallel: ParallelConfig, node: int, channels: Sequence[SignedChannel], shared: Sequence[int] | None = None
) -> Place:
    """That of the first rank of a node. ``channels``: see `ChannelGroup`; ``shared``: what `create_memory` has made for
    it (None: the node has no other rank)."""
    timeout, rank = parallel.distributed_timeout_seconds, node * parallel.ranks_per_node
    if shared is not None:
        across = ChannelGroup(channels, node, parallel.nnodes, timeout, "node")
        return _place_on_node(parallel, rank, shared[0], across)
    world, (stage, within) = ChannelGroup(channels, rank, parallel.world_size, timeout), parallel.place_of(rank)
    if stage.size == 1:
        tp = TensorParallel(within, parallel.world_size, world, expert_parallel=parallel.enable_expert_parallel)
        return Place(rank, world, tp)
    tp = TensorParallel(stage=stage)
    if stage.is_first:
        return Place(rank, world, tp, after=ChannelLink(channels[0], 1, timeout))
    return Place(rank, world, tp, before=ChannelLink(channels[0], 0, timeout))


def _place_on_node(parallel: ParallelConfig, rank: int, shared: int, across: ChannelGroup | None) -> Place:
    node, within = divmod(rank, parallel.ranks_per_node)
    local = _open(shared, within, parallel.ranks_per_node, rank - within)
    group = NodeGroup(local, across, node, parallel.nnodes)
    dealt = parallel.enable_expert_parallel
    return Place(rank, group, TensorParallel(rank, parallel.world_size, group, expert_parallel=dealt))


def _open(descriptor: int, rank: int, ranks: int, first: int = 0) -> SharedMemoryGroup:
    group = SharedMemoryGroup(descriptor, rank, ranks, first)
    os.close(descriptor)
    return group


def _copies(descriptor: int, count: int) -> list[int]:
    return [descriptor, *(os.dup(descriptor) for _ in range(count - 1))]


def _memory_file() -> int:
    """Of a file in memory, without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("octavo-stages", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
