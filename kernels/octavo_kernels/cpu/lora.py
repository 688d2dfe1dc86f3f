"""Low-rank adapters on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels import reference
from octavo_kernels.cpu.library import DTYPES, get_library, threads_for
from octavo_kernels.lora import AdapterTable, RowTiles


def lora_tiles(slots: Tensor, num_slots: int) -> RowTiles | None:
    """See `octavo_kernels.lora_tiles`; see csrc/lora_ops.h for what the tensors hold."""
    library = get_library()
    if library is None:
        return None
    count = len(slots)
    tiles = RowTiles(torch.empty(count, dtype=torch.int32), torch.empty(1 + 3 * count, dtype=torch.int32))
    library.run(library.pack("lora_tiles", slots.data_ptr(), *(t.data_ptr() for t in tiles), count, num_slots), 1)
    return tiles


def lora_shrink(x: Tensor, table: AdapterTable, slots: Tensor, tiles: RowTiles | None = None) -> Tensor:
    """See `octavo_kernels.lora_shrink`."""
    library, dtype = get_library(), DTYPES.get(x.dtype)
    tiles = tiles or lora_tiles(slots, len(table.ranks))
    if library is None or tiles is None or dtype is None or x.stride(1) != 1:
        return reference.lora_shrink(x, table, slots)
    out = torch.empty(len(x), table.width, dtype=torch.float32)
    op = library.pack(
        "lora_shrink",
        x.data_ptr(),
        tiles.rows.data_ptr(),
        tiles.slots.data_ptr(),
        table.ranks.data_ptr(),
        table.a_addresses.data_ptr(),
        out.data_ptr(),
        x.stride(0),
        x.shape[1],
        table.parts,
        table.width,
        dtype,
        DTYPES[table.dtype],
    )
    library.run(op, threads_for(x.numel() * table.width))
    return out


def lora_gather(ids: Tensor, table: AdapterTable, slots: Tensor, first: int, count: int) -> Tensor:
    """See `octavo_kernels.lora_gather`."""
    library = get_library()
    if library is None:
        return reference.lora_gather(ids, table, slots, first, count)
    out = torch.empty(len(ids), table.width, dtype=torch.float32)
    op = library.pack(
        "lora_gather",
        ids.data_ptr(),
        slots.data_ptr(),
        table.ranks.data_ptr(),
        table.a_addresses.data_ptr(),
        out.data_ptr(),
        len(ids),
        first,
        count,
        table.width,
        DTYPES[table.dtype],
    )
    library.run(op, threads_for(out.numel()))
    return out


def lora_expand_(y: Tensor, h: Tensor, table: AdapterTable, slots: Tensor, tiles: RowTiles | None = None) -> None:
    """See `octavo_kernels.lora_expand_`."""
    library, dtype = get_library(), DTYPES.get(y.dtype)
    tiles = tiles or lora_tiles(slots, len(table.ranks))
    if library is None or tiles is None or dtype is None or y.stride(1) != 1 or h.dtype != torch.float32:
        return reference.lora_expand_(y, h, table, slots)
    op = library.pack(
        "lora_expand",
        y.data_ptr(),
        h.data_ptr(),
        tiles.rows.data_ptr(),
        tiles.slots.data_ptr(),
        table.ranks.data_ptr(),
        table.b_addresses.data_ptr(),
        table.offsets.data_ptr(),
        y.stride(0),
        table.parts,
        table.width,
        dtype,
        DTYPES[table.dtype],
    )
    library.run(op, threads_for(y.numel() * table.max_rank))
