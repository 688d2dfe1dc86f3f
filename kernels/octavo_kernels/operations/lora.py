"""LoRA adapters: row t has the adapter in slot ``slots[t]`` int32 [T] of a layer's `AdapterTable`, none below 0."""

from __future__ import annotations

from torch import Tensor

from octavo_kernels.dispatch import backend_for
from octavo_kernels.lora import AdapterTable, RowTiles


def lora_tiles(slots: Tensor, num_slots: int) -> RowTiles | None:
    """The rows sorted by slot, once for all layers of a step, for kernels that want them so; None: they do not."""
    return backend_for(slots).lora_tiles(slots, num_slots)


def lora_shrink(x: Tensor, table: AdapterTable, slots: Tensor, tiles: RowTiles | None = None) -> Tensor:
    """``A x`` of each row of ``x [T, K]``: float32 ``[T, table.width]``, of which a row's adapter of rank R defines the
    first ``parts R``; sums in float32. Of a `SlotTable` each part has ``max_rank`` numbers, and on a GPU all may be in
    several parts to be added, ``[S, T, table.width]``."""
    return backend_for(x).lora_shrink(x, table, slots, tiles)


def lora_gather(ids: Tensor, table: AdapterTable, slots: Tensor, first: int, count: int) -> Tensor:
    """Gather an embedding's A: columns ``ids`` int64 [T] of A, which holds ``first`` and the ``count - 1`` ids after
    it; 0 for others."""
    return backend_for(ids).lora_gather(ids, table, slots, first, count)


def lora_expand_(y: Tensor, h: Tensor, table: AdapterTable, slots: Tensor, tiles: RowTiles | None = None) -> None:
    """Add ``B h`` to each row of ``y [T, N]``, with ``h`` as `lora_shrink` makes it; sums in float32, rounded once.
    Rows without an adapter keep their bits."""
    backend_for(y).lora_expand_(y, h, table, slots, tiles)
