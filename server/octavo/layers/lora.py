"""LoRA adapters of a layer (Hu et al., 2021): what they add to its product, row by row."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

import octavo_kernels
from octavo_kernels import AdapterTable, RowTiles, SlotTable
from octavo_kernels.quant import QuantizedRows


class RowsTwice(NamedTuple):
    """Rows as a layer's kernels take them, and as its adapters do."""

    quantized: QuantizedRows
    plain: Tensor


class AdapterRows:
    """The slot of each row's adapter in the forward pass under way; shared by all layers of a model."""

    slots: Tensor | None = None  # int32 [T], -1: none; None: no row has one
    tiles: RowTiles | None = None  # the same rows, sorted, where kernels want them so


class LayerAdapters:
    """The adapters of one layer, in slots. Those of a row-parallel layer hold this rank's columns of A, those of a
    column-parallel one its rows of B, so that what they add is this rank's part of the product."""

    def __init__(self, rows: AdapterRows, table: AdapterTable) -> None:
        self.rows, self.table = rows, table
        # True if any adapter so far had matrices for this layer, or steps are captured before there are any.
        self.has_any = isinstance(table, SlotTable)

    @property
    def are_in_use(self) -> bool:
        """True if the forward pass under way has anything to add."""
        return self.has_any and self.rows.slots is not None

    def put(self, slot: int, matrices: tuple[Tensor, Tensor] | None) -> None:
        """See `AdapterTable.set`; None: the adapter has none for this layer."""
        a, b = matrices or (None, None)
        self.table.set(slot, a, b)
        self.has_any |= matrices is not None

    def add_(self, y: Tensor, x: Tensor) -> None:
        """Add to ``y [T, N]`` what the rows' adapters make of ``x [T, K]``."""
        slots, tiles = self._slots(len(x)), self.rows.tiles
        h = octavo_kernels.lora_shrink(x, self.table, slots, tiles)
        octavo_kernels.lora_expand_(y, h, self.table, slots, tiles)

    def add_rows_(self, y: Tensor, ids: Tensor, held: slice) -> None:
        """Add to the rows ``y [T, H]`` of an embedding what their adapters say of ``ids`` int64 ``[T]``, of which this
        rank holds those in ``held``."""
        slots = self._slots(len(ids))
        h = octavo_kernels.lora_gather(ids, self.table, slots, held.start, held.stop - held.start)
        octavo_kernels.lora_expand_(y, h, self.table, slots, self.rows.tiles)

    def _slots(self, count: int) -> Tensor:
        slots = self.rows.slots
        assert slots is not None
        if len(slots) != count:
            raise RuntimeError(f"a layer has {count} rows where the step has {len(slots)}: it takes no adapters")
        return slots
