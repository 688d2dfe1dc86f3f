"""The tensor-parallel group that a layer belongs to; passed to each layer, never a global."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from octavo.interface.ranks import ONE_STAGE, Stage, deal, divide
from octavo_kernels.cpu import SharedMemory, argmax

ONE_SHOT_BYTES = 512 << 10  # of a tensor that every rank is sent whole


class Group(Protocol):
    """Ranks that exchange tensors. Every rank makes the same calls in the same order, with tensors of equal shapes;
    no result depends on how many rows there are, and all ranks have the same bits."""

    def all_reduce(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The sum of every rank's ``x``, contiguous: in the order of ranks and in float32, rounded once. In the place
        of ``x``, unless another ``dtype`` is asked for."""

    def all_gather(self, x: Tensor, total: int, wants: Tensor | None = None) -> Tensor:
        """Every rank's ``x [T, >= own]`` side by side: ``[T, total]``. Ranks have ceil(total / ranks) columns each, the
        last ones fewer. ``wants`` int64 [1]: where it is 0 the result may be undefined."""

    def best(self, index: Tensor | None, value: Tensor | None, offset: int, rows: int) -> tuple[Tensor, Tensor]:
        """`argmax` int64 and the value [rows] of all ranks' columns, from this rank's, of which ``offset`` is the first
        (None: it has none)."""

    def smallest(self, numbers: Sequence[int]) -> list[int]:
        """The smallest of every rank's, one by one."""

    def check(self) -> None:
        """Raise RuntimeError, which names ranks, where results since the last call are meaningless as some rank did
        not take part."""

    def stop(self) -> None:
        """Have no rank wait for another any more; to be called from any thread."""

    @property
    def late(self) -> list[int]:
        """Ranks that others are known to wait for; to be asked when a step is overdue."""

    @property
    def device_bytes(self) -> int:
        """The bytes of a GPU's memory that exchanging takes."""


class SharedMemoryGroup(SharedMemory):
    """A `Group` of processes on one machine's CPUs, whose operations a recorded step may have."""

    device_bytes = 0

    def __init__(self, descriptor: int, rank: int, ranks: int, first_rank: int = 0) -> None:
        """``first_rank``: of the group, among all of the engine, as errors call it."""
        super().__init__(descriptor, rank, ranks)
        self._first_rank = first_rank

    def smallest(self, numbers: Sequence[int]) -> list[int]:
        """See `Group`."""
        found = super().smallest(numbers)
        self.check()
        return found

    def check(self) -> None:
        """See `Group`."""
        if self.stopped:
            first = self._first_rank
            late = ", ".join(f"rank {first + rank}" for rank in self.late) or "a rank"
            raise RuntimeError(
                f"{late} did not take part in an exchange ({self.stopped}); rank {first + self.rank} waited"
            )


class GatheringGroup:
    """A `Group` that gathers everything and adds up here, as other libraries' sums depend on places and sizes."""

    rank: int
    ranks: int
    device = torch.device("cpu")
    device_bytes = 0

    @property
    def late(self) -> list[int]:
        """See `Group`; not known."""
        return []

    def all_reduce(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """See `Group`."""
        total = sum_in_order(self.gather(x))
        return x.copy_(total) if dtype in (None, x.dtype) else total.to(dtype)

    def all_gather(self, x: Tensor, total: int, wants: Tensor | None = None) -> Tensor:
        """See `Group`."""
        most = -(-total // self.ranks)
        own = x[:, :most]
        if own.shape[1] < most:
            own = functional.pad(own, (0, most - own.shape[1]))
        return torch.cat(list(self.gather(own)), dim=1)[:, :total].contiguous()

    def best(self, index: Tensor | None, value: Tensor | None, offset: int, rows: int) -> tuple[Tensor, Tensor]:
        """See `Group`."""
        mine = torch.full((rows, 2), -1.0, dtype=torch.float64, device=self.device)  # holds both exactly
        if index is not None and value is not None:
            mine[:, 0], mine[:, 1] = index + offset, value
        return best_in_order(self.gather(mine))

    def smallest(self, numbers: Sequence[int]) -> list[int]:
        """See `Group`."""
        return torch.stack(list(self.gather(torch.tensor(numbers, device=self.device)))).amin(dim=0).tolist()

    def check(self) -> None:
        """See `Group`; a call that fails raises by itself."""

    def stop(self) -> None:
        """See `Group`."""

    def gather(self, x: Tensor) -> Sequence[Tensor] | Tensor:
        """Every rank's ``x``, which all have of one shape, in their order."""
        raise NotImplementedError


class TorchGroup(GatheringGroup):
    """A group over one of torch's backends, gloo or NCCL, which moves tensors and adds up none. Each rank adds up a
    part of larger ones, and gathers the others'."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device = torch.device("cpu"), one_shot_bytes: int = ONE_SHOT_BYTES
    ) -> None:
        self._group, self.rank, self.ranks = group, group.rank(), group.size()
        self.device, self.one_shot_bytes, self._stopped = device, one_shot_bytes, False

    def all_reduce(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """See `Group`."""
        if x.nbytes <= self.one_shot_bytes:
            return super().all_reduce(x, dtype)
        parts = functional.pad(x.view(-1), (0, -x.numel() % self.ranks)).view(self.ranks, -1)
        found = torch.empty_like(parts)
        self._group.alltoall_base(found, parts, [], []).wait()
        x.view(-1).copy_(self.gather(sum_in_order(found)).view(-1)[: x.numel()])
        return x if dtype is None else x.to(dtype)

    def check(self) -> None:
        """See `Group`; a call that fails raises by itself, one that was stopped may not."""
        if self._stopped:
            raise RuntimeError(f"an exchange was stopped, rank {self.rank} waited")

    def stop(self) -> None:
        """See `Group`."""
        self._stopped = True
        self._group.abort()

    def gather(self, x: Tensor) -> Tensor:
        """See `GatheringGroup`."""
        found = torch.empty(self.ranks * x.numel(), dtype=x.dtype, device=x.device)
        self._group._allgather_base(found, x.contiguous().view(-1)).wait()
        return found.view(self.ranks, *x.shape)


class Replicas:
    """Engines of which each has requests of its own and the whole model but for experts: these are dealt to all, so in
    each layer that has some everyone computes everyone's rows. All step together, with as many rows as `set_rows` says.
    """

    def __init__(self, rank: int, ranks: int, memory: SharedMemory | None = None) -> None:
        """``memory`` may be missing where nothing is computed."""
        self.rank, self.ranks, self._shared = rank, ranks, memory
        self.rows: Sequence[int] = [0] * ranks
        self._rows = torch.zeros(ranks, dtype=torch.int64)

    @property
    def _memory(self) -> SharedMemory:
        assert self._shared is not None
        return self._shared

    @property
    def total(self) -> int:
        """Rows of all."""
        return sum(self.rows)

    def set_rows(self, rows: Sequence[int]) -> None:
        """Set each replica's rows in the next step, or, while a step is recorded, in that one."""
        self.rows = rows
        self._rows.numpy()[:] = rows

    def gather(self, x: Tensor, ids: Tensor, weights: Tensor, first_expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `SharedMemory.gather_rows`."""
        return self._memory.gather_rows(x, ids, weights, self._rows, first_expert)

    def sum(self, parts: Tensor, like: Tensor, shared: Tensor | None, gate: Tensor | None) -> Tensor:
        """See `SharedMemory.sum_rows`."""
        return self._memory.sum_rows(parts, self._rows, like, shared, gate)

    def check(self) -> None:
        """Raise RuntimeError, which names the late, where results since the last call are meaningless."""
        if self._memory.stopped:
            late = ", ".join(f"core {rank}" for rank in self._memory.late) or "a core"
            raise RuntimeError(f"{late} did not take part in an exchange of experts; core {self.rank} waited")


def sum_in_order(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """The sum of every rank's tensor as all groups have it: in order, in float32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def best_in_order(parts: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """The best of each row of every rank's (index, value) float64 [rows, 2]; ranks without columns have index -1."""
    found = parts[0]
    for part in parts[1:]:
        value, other = found[:, 1], part[:, 1]
        better = (part[:, 0] >= 0) & ~value.isnan() & ((other > value) | other.isnan())
        found = torch.where(better[:, None], part, found)
    return found[:, 0].long(), found[:, 1].float()


@dataclass(frozen=True)
class TensorParallel:
    """Rank ``rank`` of ``size`` that together hold a model, or ``stage`` of one. ``group`` may be missing where nothing
    is computed.

    ``expert_parallel``: each rank has some of a layer's experts whole, instead of a part of every one. They are dealt
    to ``replicas`` where there are any, of one rank each.
    """

    rank: int = 0
    size: int = 1
    group: Group | None = None
    stage: Stage = ONE_STAGE
    expert_parallel: bool = False
    replicas: Replicas | None = None

    def divide(self, total: int, what: str) -> int:
        """``total / size``; ConfigError when it does not divide."""
        return divide(total, self.size, what)

    def shares(self, total: int) -> tuple[int, int]:
        """The columns that `all_gather` takes of this rank: the first of ``total``, and the one after the last."""
        most = -(-total // self.size)
        return min(self.rank * most, total), min((self.rank + 1) * most, total)

    def experts(self, total: int) -> range:
        """The numbers of this rank's experts, of which it has at least a part."""
        group = self.replicas
        if group is not None:
            return deal(total, group.rank, group.ranks)
        return deal(total, self.rank, self.size) if self.expert_parallel else range(total)

    def part_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype in which to keep this rank's part of a sum, which is to become x's: on CPUs float32, which costs
        little there, so that nothing is rounded before the sum is whole."""
        is_part = self.size > 1 or self.replicas is not None
        return torch.float32 if is_part and x.device.type == "cpu" else x.dtype

    def all_reduce(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The sum of every rank's ``x``: in place, unless another ``dtype`` is asked for."""
        if self.size == 1:
            return x if dtype in (None, x.dtype) else x.to(dtype)
        assert self.group is not None
        return self.group.all_reduce(x.contiguous(), dtype)

    def all_gather(self, x: Tensor, total: int, wants: Tensor | None = None) -> Tensor:
        """See `Group`; on one rank the first ``total`` columns."""
        if self.size == 1:
            return x if x.shape[1] == total else x[:, :total]
        assert self.group is not None
        return self.group.all_gather(x, total, wants)

    def find_best(self, x: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """`argmax` of what `all_gather` would return of ``x`` float32, without gathering it."""
        first, end = self.shares(total)
        index, value = argmax(x[:, : end - first]) if end > first else (None, None)
        return self.best_of_ranks(index, value, first, len(x))

    def best_of_ranks(self, index: Tensor | None, value: Tensor | None, first: int, rows: int) -> tuple[Tensor, Tensor]:
        """See `Group.best`."""
        assert self.group is not None
        return self.group.best(index, value, first, rows)
