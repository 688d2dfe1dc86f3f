"""Exchange between the processes that hold parts of one model on a CPU, through shared memory (csrc/collectives.c).

Every rank makes the same calls in the same order, with tensors of the same sizes. Sums are made in the order of ranks
and in float32, rounded once, so that no row depends on how many there are. A recorded step may have these operations.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo_kernels.cpu.library import DTYPES, as_contiguous, get_library, threads_for

MAX_RANKS = 48  # csrc/collectives_ops.h
_HEADER = 4096
_RANK = 64  # bytes of the header for the whole, and for each rank
_SLOT = 2 << 20
_SPINS = 4000  # about 50 us; then sleep: a rank that is late may need this core
_STOPPED = ("", "a rank did not come", "told to stop")


def shared_memory_bytes(ranks: int) -> int:
    """Return the bytes of shared memory for one group of ``ranks``, all ranks together."""
    return _HEADER + 2 * ranks * _SLOT


def create_shared_memory(ranks: int, timeout_seconds: float = 600.0, has_cores: bool = True) -> int:
    """The descriptor of memory for one group, which other processes inherit: it has no name and is gone with the last
    of them. Raises ValueError for more than `MAX_RANKS`.

    ``timeout_seconds``: how long a rank waits for the others before all are `SharedMemory.stopped`; ``has_cores``:
    whether each has cores of its own, and may spin for a while.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"ranks: shared memory serves 1 to {MAX_RANKS} processes, not {ranks}")
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("octavo-ranks", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, shared_memory_bytes(ranks))
    spins = _SPINS if has_cores else _SPINS // 40
    os.pwrite(descriptor, struct.pack("=IIq", 0, spins, int(timeout_seconds * 1e9)), 0)
    return descriptor


class SharedMemory:
    """One rank's view of such memory, of which it keeps a mapping and not the descriptor."""

    def __init__(self, descriptor: int, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._memory = mmap.mmap(descriptor, shared_memory_bytes(ranks))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._exchange = (address, rank, ranks, _SLOT)

    @property
    def stopped(self) -> str:
        """The reason why results have been invalid since some call; "" while they are valid."""
        return _STOPPED[struct.unpack_from("=I", self._memory)[0]]

    @property
    def late(self) -> list[int]:
        """The ranks that have come to fewer exchanges than another one has."""
        turns = [struct.unpack_from("=I", self._memory, _RANK * (1 + rank))[0] for rank in range(self.ranks)]
        return [rank for rank, own in enumerate(turns) if any(0 < (other - own) % 2**32 < 2**31 for other in turns)]

    def stop(self) -> None:
        """Have no rank wait any more, now or later."""
        if not self.stopped:
            struct.pack_into("=I", self._memory, 0, 2)

    def all_reduce(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The sum of every rank's ``x`` float32 or bfloat16 [T, N], contiguous: in its place or, of float32, as
        bfloat16 if that is the ``dtype``."""
        if not x.is_contiguous() or x.dtype not in DTYPES:
            raise ValueError(f"x: must be contiguous, in float32 or bfloat16, not {x.dtype} with strides {x.stride()}")
        if dtype not in (None, x.dtype, torch.bfloat16):
            raise ValueError(f"dtype: a sum of {x.dtype} is not kept as {dtype}")
        out = x if dtype in (None, x.dtype) else torch.empty(x.shape, dtype=dtype)
        width, count, dtypes = x.shape[-1], x.numel(), (DTYPES[x.dtype], DTYPES[out.dtype])
        for first in range(0, count, _SLOT // x.element_size()):
            rows = count // width
            self._run("all_reduce", count, x.data_ptr(), out.data_ptr(), *self._exchange, rows, width, first, *dtypes)
        return out

    def all_gather(self, x: Tensor, total: int, wants: Tensor | None = None) -> Tensor:
        """Every rank's ``x [T, >= own]`` side by side: ``[T, total]``. Ranks have ceil(total / ranks) columns each, the
        last ones fewer. ``wants`` int64 [1], alike on all ranks: where it is 0 the result is undefined."""
        if x.shape[1] > 1 and x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty(len(x), total)
        rows = _SLOT // (-(-total // self.ranks) * x.element_size())
        if not rows:
            raise ValueError(f"x: {total} columns over {self.ranks} ranks do not fit a slot of {_SLOT} bytes")
        for first in range(0, len(x), rows):
            self._run(
                "all_gather",
                out.numel(),
                x.data_ptr(),
                0 if wants is None else wants.data_ptr(),
                out.data_ptr(),
                *self._exchange,
                len(x),
                x.stride(0),
                total,
                first,
                x.element_size(),
            )
        return out

    def broadcast(self, x: Tensor) -> None:
        """Replace ``x [T, N]``, contiguous, by rank 0's."""
        if not x.is_contiguous():
            raise ValueError(f"x: must be contiguous, not with strides {x.stride()}")
        width = x.shape[1] * x.element_size()  # a row is one element of rank 0, and none of the others
        rows = _SLOT // width
        if not rows:
            raise ValueError(f"x: a row of {width} bytes does not fit a slot of {_SLOT}")
        for first in range(0, len(x), rows):
            self._run(
                "all_gather", x.numel(), x.data_ptr(), 0, x.data_ptr(), *self._exchange, len(x), 1, 1, first, width
            )

    def best(self, index: Tensor | None, value: Tensor | None, offset: int, rows: int) -> tuple[Tensor, Tensor]:
        """`argmax` of all ranks' columns, from those int64 and float32 [rows] of this rank's, of which ``offset`` is
        the first (None: it has none)."""
        out_index, out_value = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        tensors = (index, value, out_index, out_value)
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        for first in range(0, rows, _SLOT // 16):
            self._run("best_of_ranks", rows, *addresses, *self._exchange, rows, offset, first)
        return out_index, out_value

    def gather_rows(
        self, x: Tensor, ids: Tensor, weights: Tensor, counts: Tensor, first_expert: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows that ranks compute apart, one rank's after another's: of each, ``x [>= own, H]`` and the ``ids`` int32
        and ``weights`` float32 ``[>= own, k]`` of its experts, here counted from ``first_expert`` on. ``counts`` int64
        [ranks], alike on all ranks, is how many rows each has; a recorded step reads them when it is replayed."""
        x, ids, weights = as_contiguous(x), as_contiguous(ids, torch.int32), as_contiguous(weights, torch.float32)
        numbers, k = counts.numpy(), ids.shape[1]  # no operation of torch's: the step may be recorded
        total, most = int(numbers.sum()), int(numbers.max())
        out = x.new_empty(total, x.shape[1]), ids.new_empty(total, k), weights.new_empty(total, k)
        row = x.shape[1] * x.element_size()
        addresses = [tensor.data_ptr() for tensor in (x, ids, weights, *out, counts)]
        for first in range(0, most, self._rows_in_slot(row + 8 * k)):
            self._run("gather_rows", out[0].numel(), *addresses, *self._exchange, row, k, first_expert, first)
        return out

    def sum_rows(
        self, parts: Tensor, counts: Tensor, like: Tensor, shared: Tensor | None = None, gate: Tensor | None = None
    ) -> Tensor:
        """Sum this rank's rows of every rank's ``parts``, float32 [sum of counts, H], in the order of ranks.

        Adds this rank's own ``sigmoid(gate) * shared``. The result has the shape and dtype of ``like`` [>= own, H];
        rows beyond its own are zeros. Raises ValueError for another dtype than float32 and bfloat16.
        """
        if like.dtype not in DTYPES:
            raise ValueError(f"like: must be float32 or bfloat16, not {like.dtype}")
        shared = None if shared is None else as_contiguous(shared, like.dtype)
        gate = None if gate is None else as_contiguous(gate, torch.float32)
        out, width = like.new_empty(like.shape), like.shape[1]
        if len(like) > (own := int(counts.numpy()[self.rank])):
            out[own:] = 0
        tensors = (parts, shared, gate, out, counts)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        for first in range(0, len(parts), self._rows_in_slot(4 * width)):
            self._run("sum_rows", parts.numel(), *addresses, *self._exchange, width, first, DTYPES[like.dtype])
        return out

    @staticmethod
    def _rows_in_slot(size: int) -> int:
        if size > _SLOT:
            raise ValueError(f"x: a row of {size} bytes does not fit a slot of {_SLOT}")
        return _SLOT // size

    def smallest(self, numbers: Sequence[int]) -> list[int]:
        """The smallest of every rank's, one by one."""
        mine = torch.tensor([numbers], dtype=torch.int64)
        return self.all_gather(mine, len(numbers) * self.ranks).view(self.ranks, -1).amin(dim=0).tolist()

    def _run(self, name: str, elements: int, *args: int) -> None:
        library = get_library()
        if library is None:
            raise RuntimeError("shared memory needs the CPU kernels: see octavo_kernels.cpu.unavailable_reason()")
        library.run(library.pack(name, *args), threads_for(elements))
