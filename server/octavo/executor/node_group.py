"""Ranks of several nodes: they exchange through shared memory within one, and by the first of each between them."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.executor.channel_group import ChannelGroup
from octavo.layers.parallel import GatheringGroup, SharedMemoryGroup, sum_in_order


class NodeGroup(GatheringGroup):
    """See `octavo.layers.parallel.Group`. What the ranks of a node have is gathered there, the first ranks exchange it
    and add up, in the order of all ranks, and have their node's others see the result."""

    def __init__(self, local: SharedMemoryGroup, across: ChannelGroup | None, node: int, nodes: int) -> None:
        """``across``: to the first ranks of the other nodes; None: this one is not the first of its own."""
        self.rank, self.ranks = node * local.ranks + local.rank, nodes * local.ranks
        self._local, self._across = local, across

    @property
    def late(self) -> list[int]:
        """See `Group`."""
        own = [self.rank - self._local.rank + index for index in self._local.late]
        return own + [node * self._local.ranks for node in (self._across.late if self._across is not None else [])]

    def all_reduce(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """See `Group`; only the sum goes back to the others of a node."""
        gathered = self._gather_local(x)
        if self._across is not None:
            x.copy_(sum_in_order(self._split(self._exchange(gathered))))
        self._local.broadcast(x)
        return x if dtype is None else x.to(dtype)

    def check(self) -> None:
        """See `Group`."""
        self._local.check()

    def stop(self) -> None:
        """See `Group`."""
        self._local.stop()
        if self._across is not None:
            self._across.stop()

    def gather(self, x: Tensor) -> list[Tensor]:
        """See `GatheringGroup`."""
        flat = x.contiguous().view(-1, x.shape[-1])
        gathered = self._gather_local(flat)
        whole = flat.new_empty(len(flat), self.ranks * flat.shape[1])
        if self._across is not None:
            whole.copy_(self._exchange(gathered))
        self._local.broadcast(whole)
        return [part.reshape(x.shape) for part in self._split(whole)]

    def _gather_local(self, x: Tensor) -> Tensor:
        return self._local.all_gather(x, self._local.ranks * x.shape[1])

    def _exchange(self, gathered: Tensor) -> Tensor:
        """Exchange ``gathered [T, local ranks x N]`` of each node; returns ``[T, ranks x N]``."""
        assert self._across is not None
        self._local.check()  # else the other nodes would be sent what means nothing
        return torch.cat(self._across.gather(gathered), dim=1)

    def _split(self, whole: Tensor) -> tuple[Tensor, ...]:
        return whole.view(len(whole), self.ranks, -1).unbind(dim=1)
