"""A rank's position among the others, and the groups and links through which it exchanges tensors."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.executor.channel_group import ChannelGroup
from octavo.executor.node_group import NodeGroup
from octavo.executor.stage_links import ChannelLink, MemoryLink, NoLink, SpreadLink
from octavo.executor.tls_channel import TlsChannel
from octavo.interface.engine_config import EngineConfig, ParallelConfig
from octavo.layers.parallel import Group, SharedMemoryGroup, TensorParallel
from octavo.worker.stage import StageLink
from octavo_kernels.cpu import create_shared_memory

_START_SECONDS = 600.0  # that stages wait for one another at start


@dataclass(frozen=True)
class Place:
    """The position of one rank. ``world``: the group of all ranks, by which they agree on sizes at start."""

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
    also that of its own, then a socket and memory for the link with the stage before and with the stage after. Of
    several machines, memory that its ranks have, then what links the first of them, which hears from the stage before,
    with each other one."""
    ranks, timeout = parallel.tensor_parallel_size, parallel.distributed_timeout_seconds
    if parallel.nnodes > 1:
        ranks = parallel.ranks_per_node
        found = [[one] for one in _copies(create_shared_memory(ranks, timeout, has_cores), ranks)]
        if parallel.pipeline_parallel_size > 1 and parallel.node_rank > 0:
            for rank in range(1, ranks):
                _link(found, 0, rank)
        return found
    if parallel.pipeline_parallel_size == 1:
        return [[one] for one in _copies(create_shared_memory(ranks, timeout, has_cores), ranks)]
    size = parallel.world_size
    found = [[one] for one in _copies(create_shared_memory(size, _START_SECONDS, has_cores), size)]
    for first in range(0, size, ranks):
        own = create_shared_memory(ranks, timeout, has_cores)
        for rank, one in enumerate(_copies(own, ranks), first):
            found[rank].append(one)
    for rank in range(size - ranks):
        _link(found, rank, rank + ranks)
    return found


def _link(found: list[list[int]], first: int, second: int) -> None:
    for end, one, memory in zip(socket.socketpair(), (first, second), _copies(_memory_file(), 2), strict=True):
        found[one] += [end.detach(), memory]


def local_place(parallel: ParallelConfig, rank: int, descriptors: Sequence[int]) -> Place:
    """The place of a rank among others of one machine, from the result of `create_memory` for it; takes the
    descriptors."""
    (stage, within), ranks = parallel.place_of(rank), parallel.tensor_parallel_size
    (world, *rest), dealt = descriptors, parallel.enable_expert_parallel
    if parallel.nnodes > 1:
        return _place_on_node(parallel, rank, descriptors, None)
    group = _open(world, rank, parallel.world_size)
    if stage.size == 1:
        return Place(rank, group, TensorParallel(within, ranks, group, expert_parallel=dealt))
    own, *links = rest
    others = [rank - ranks] * (not stage.is_first) + [rank + ranks] * (not stage.is_last)
    found = _memory_links(links, stage.size, others)
    of_stage = _open(own, within, ranks, rank - within)
    return Place(
        rank,
        group,
        TensorParallel(within, ranks, of_stage, stage, dealt),
        None if stage.is_first else found[0],
        None if stage.is_last else found[-1],
    )


def device_place(config: EngineConfig, rank: int, folder: Path, check: Callable[[], None] = lambda: None) -> Place:
    """The place of a rank with a GPU of its own; see `open_device_group`."""
    from octavo.executor.device_groups import open_device_group  # not before: with CPUs there may be no Triton

    group = open_device_group(config, rank, folder, check)
    return Place(rank, group, TensorParallel(rank, config.parallel.tensor_parallel_size, group))


def place_of_node(
    parallel: ParallelConfig, node: int, channels: Sequence[TlsChannel], shared: Sequence[int] | None = None
) -> Place:
    """The place of the first rank of a node. ``channels``: see `ChannelGroup`; ``shared``: the result of
    `create_memory` for it (None: the node has no other rank)."""
    timeout, rank = parallel.distributed_timeout_seconds, node * parallel.ranks_per_node
    if shared is not None:
        across = ChannelGroup(channels, node, parallel.nnodes, timeout, "node")
        place = _place_on_node(parallel, rank, shared, across)
    else:
        world = ChannelGroup(channels, rank, parallel.world_size, timeout)
        place = Place(rank, world, _on_one_of(parallel, rank, world, None))
    stage, ranks = place.tp.stage, parallel.ranks_per_node
    before: StageLink | None = None
    if not stage.is_first:
        before = ChannelLink(channels[0], rank - ranks, timeout)
        if shared is not None:
            before = SpreadLink(before, _memory_links(shared[1:], stage.size, range(rank + 1, rank + ranks)))
    after = None if stage.is_last else ChannelLink(channels[0], rank + ranks, timeout, channels if node == 0 else ())
    return replace(place, before=before, after=after)


def _place_on_node(
    parallel: ParallelConfig, rank: int, descriptors: Sequence[int], across: ChannelGroup | None
) -> Place:
    (shared, *links), (node, within) = descriptors, divmod(rank, parallel.ranks_per_node)
    local = _open(shared, within, parallel.ranks_per_node, rank - within)
    group = NodeGroup(local, across, node, parallel.nnodes)
    tp = _on_one_of(parallel, rank, group, local)
    if across is not None or tp.stage.size == 1:
        return Place(rank, group, tp)
    before = None if tp.stage.is_first else _memory_links(links, tp.stage.size, [rank - within])[0]
    return Place(rank, group, tp, before, None if tp.stage.is_last else NoLink())


def _on_one_of(parallel: ParallelConfig, rank: int, all_ranks: Group, local: Group | None) -> TensorParallel:
    """The tensor parallelism of a rank, if each machine has a stage of its own or all share one."""
    (stage, within), ranks = parallel.place_of(rank), parallel.tensor_parallel_size
    group = all_ranks if stage.size == 1 else local
    return TensorParallel(within, ranks, group, stage, parallel.enable_expert_parallel)


def _memory_links(descriptors: Sequence[int], slots: int, others: Sequence[int]) -> list[MemoryLink]:
    """Make links to ``others`` from two descriptors each."""
    pairs = zip(descriptors[::2], descriptors[1::2], others, strict=True)
    return [MemoryLink(socket.socket(fileno=end), memory, slots, other) for end, memory, other in pairs]


def _open(descriptor: int, rank: int, ranks: int, first: int = 0) -> SharedMemoryGroup:
    group = SharedMemoryGroup(descriptor, rank, ranks, first)
    os.close(descriptor)
    return group


def _copies(descriptor: int, count: int) -> list[int]:
    return [descriptor, *(os.dup(descriptor) for _ in range(count - 1))]


def _memory_file() -> int:
    """Return the descriptor of an unnamed file in memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("octavo-stages", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
