"""Low-rank adapters of one layer (Hu et al., 2021): ``y += B A x``, with A and B by row of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 256  # bytes, of matrices in a slot


class AdapterTable:
    """The adapters of one layer, in slots. A layer has one or more ``parts``, as the products that a merged layer
    holds; each part has an A of its own and B for its own outputs.

    Its memory stays where it is: a recorded step may refer to it, and adapters come and go between steps.
    """

    def __init__(self, num_slots: int, max_rank: int, sizes: Sequence[int], dtype: torch.dtype) -> None:
        """``sizes``: outputs of each part; ``dtype``: of A and B, float32 or bfloat16."""
        self.max_rank, self.parts, self.widest, self.dtype = max_rank, len(sizes), max(sizes), dtype
        self.offsets = torch.tensor([0, *sizes], dtype=torch.int64, device="cpu").cumsum(0)
        self.ranks = torch.zeros(num_slots, dtype=torch.int32, device="cpu")
        self.a_addresses = torch.zeros(num_slots, dtype=torch.int64, device="cpu")
        self.b_addresses = torch.zeros(num_slots, dtype=torch.int64, device="cpu")
        self.a: list[Tensor | None] = [None] * num_slots
        self.b: list[Tensor | None] = [None] * num_slots

    @property
    def width(self) -> int:
        """Numbers that `octavo_kernels.lora_shrink` makes of a row."""
        return self.parts * self.max_rank

    def set(self, slot: int, a: Tensor | None, b: Tensor | None) -> None:
        """Put an adapter of rank R into a slot: ``a [parts R, K]`` (of an embedding ``[V, R]``) and ``b [R, N]``, both
        contiguous; None: one that leaves this layer as it is."""
        self.a[slot], self.b[slot] = a, b
        self.ranks[slot] = 0 if b is None else len(b)
        self.a_addresses[slot] = 0 if a is None else a.data_ptr()
        self.b_addresses[slot] = 0 if b is None else b.data_ptr()


class RowTiles(NamedTuple):
    """The rows of a step that have an adapter, sorted by slot, in tiles of one slot each."""

    # On a GPU; on a CPU see `lora_tiles` in csrc/lora_ops.h
    rows: Tensor  # int32 [tiles * rows of a tile]; -1: none
    slots: Tensor  # int32 [tiles]; -1: an empty tile


class SlotTable(AdapterTable):
    """An `AdapterTable` whose adapters lie in a `SlotMemory`, with 0 wherever one has a lower rank than the highest:
    ``placed_a [slots, parts max_rank, K]`` (of an embedding ``[slots, V, max_rank]``), ``placed_b [slots, max_rank,
    N]``, ``placed_ranks`` int32 ``[slots]``; ``placed_offsets`` int64 [parts + 1], of each part's outputs."""

    placed_a: Tensor
    placed_b: Tensor
    placed_ranks: Tensor
    placed_offsets: Tensor
    is_aligned: bool  # parts begin at multiples of 16

    def put_in(self, a: Tensor, b: Tensor, ranks: Tensor) -> None:
        """Take these for what is held; see above."""
        self.placed_a, self.placed_b, self.placed_ranks = a, b, ranks
        self.placed_offsets, self.is_aligned = self.offsets.to(a.device), not (self.offsets % 16).any()
        for slot in range(len(a)):
            self.set(slot, a[slot], b[slot])


@dataclass(frozen=True)
class _Place:
    """The offsets, in bytes, of a layer's A of ``shape``, B and rank in a slot."""

    table: SlotTable
    shape: tuple[int, int]
    is_embedding: bool
    a: int
    b: int
    rank: int

    def views(self, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of slots ``memory``, uint8 [slots, bytes]."""
        table = self.table

        def view(begin: int, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
            held = memory[:, begin : begin + rows * columns * dtype.itemsize].view(dtype)
            return held.view(-1, rows, columns)

        b = view(self.b, table.dtype, table.max_rank, int(table.offsets[-1]))
        return view(self.a, table.dtype, *self.shape), b, view(self.rank, torch.int32, 1, 1)[:, 0, 0]


class SlotMemory:
    """Slots in a device's memory, each with room for A and B of every layer in the highest rank. All lies there as it
    does in an adapter's image in host memory, so that an adapter comes into a slot in one copy."""

    def __init__(self, num_slots: int, max_rank: int, dtype: torch.dtype) -> None:
        """``dtype``: of A and B."""
        self._num_slots, self._max_rank, self._dtype = num_slots, max_rank, dtype
        self.num_bytes = 0  # of a slot
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # [slots, num_bytes]; none yet
        self._places: list[_Place] = []

    def add(self, sizes: Sequence[int], inputs: int, is_embedding: bool = False) -> SlotTable:
        """Make room for a layer with ``inputs`` K (ids V of an embedding) and parts of ``sizes``."""
        table = SlotTable(self._num_slots, self._max_rank, sizes, self._dtype)
        shape = (inputs, self._max_rank) if is_embedding else (table.width, inputs)
        of_a, of_b = (count * self._dtype.itemsize for count in (math.prod(shape), self._max_rank * sum(sizes)))
        place = _Place(table, shape, is_embedding, self._room(of_a), self._room(of_b), self._room(4))
        self._places.append(place)
        return table

    def _room(self, size: int) -> int:
        begin = self.num_bytes
        self.num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT
        return begin

    def allocate(self, device: torch.device) -> None:
        """Empty slots, once every layer has been added."""
        self._memory = torch.zeros(self._num_slots, self.num_bytes, dtype=torch.uint8, device=device)
        for place in self._places:
            place.table.put_in(*place.views(self._memory))

    def image(self, matrices: Sequence[tuple[Tensor, Tensor] | None]) -> Tensor:
        """Build an adapter's image of a slot: uint8 ``[num_bytes]`` in host memory, pinned for a GPU. ``matrices``: A
        and B of each layer, see `AdapterTable.set`, in the order in which they were added."""
        is_pinned = self._memory.device.type == "cuda"
        image = torch.zeros(self.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        for place, pair in zip(self._places, matrices, strict=True):
            if pair is None:
                continue
            (a, b), (to_a, to_b, rank) = pair, (view[0] for view in place.views(image[None]))
            rank.fill_(len(b))
            to_b[: len(b)] = b
            if place.is_embedding:
                to_a[:, : len(b)] = a
            else:
                parts = place.table.parts
                to_a.unflatten(0, (parts, -1))[:, : len(b)] = a.unflatten(0, (parts, -1))
        return image

    def fill(self, slot: int, image: Tensor) -> None:
        """Copy an `image` into a slot, without waiting for that."""
        self._memory[slot].copy_(image, non_blocking=True)
