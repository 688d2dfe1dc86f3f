"""The tensor-parallel group that a layer belongs to; passed to each layer, never a global."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.errors import ConfigError


class Group(Protocol):
    """Ranks that exchange tensors. Every rank makes the same calls in the same order, with tensors of equal shapes."""

    def all_reduce(self, x: Tensor) -> None:
        """Replace ``x`` by the sum of every rank's: in the order of ranks and in float32, rounded once, so that no size
        of a batch and no rank has other bits. Raises RuntimeError when a rank is lost."""

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's ``x``, in the order of ranks. Raises RuntimeError when a rank is lost."""


class TorchGroup:
    """A `Group` over one of torch's, such as gloo between nodes. Its own sums depend on positions, so that none is
    used."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_reduce(self, x: Tensor) -> None:
        """See `Group`."""
        first, *others = self.all_gather(x)
        total = first.float()
        for part in others:
            total = total + part.float()
        x.copy_(total)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """See `Group`."""
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self._group.size())]
        self._group.allgather([parts], [x.contiguous()]).wait()
        return parts


@dataclass(frozen=True)
class TensorParallel:
    """Rank ``rank`` of ``size`` that together hold a model. ``group`` may be missing where nothing is computed."""

    rank: int = 0
    size: int = 1
    group: Group | None = None

    def divide(self, total: int, what: str) -> int:
        """``total / size``; ConfigError when it does not divide."""
        if total % self.size:
            raise ConfigError(
                f"{what} ({total}) cannot be split over {self.size} ranks; "
                "choose a tensor parallel size that divides it"
            )
        return total // self.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``, in place."""
        if self.size > 1:
            assert self.group is not None
            self.group.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's ``x [T, N]`` side by side: ``[T, N * size]``."""
        if self.size == 1:
            return x
        assert self.group is not None
        return torch.cat(self.group.all_gather(x), dim=-1)
