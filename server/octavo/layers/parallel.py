"""The tensor-parallel group that a layer belongs to; passed to each layer, never a global."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.errors import ConfigError


@dataclass(frozen=True)
class TensorParallel:
    """Rank ``rank`` of ``size`` that together hold a model. ``group`` None is torch's default group."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

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
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's ``x [T, N]`` side by side: ``[T, N * size]``."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)
