"""Low-rank adapters on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels import reference
from octavo_kernels.adapters import AdapterTable, RowTiles
from octavo_kernels.cpu.library import DTYPES, get_library, threads_for


def lora_shrink(x: Tensor, table: AdapterTable, slots: Tensor, tiles: RowTiles | None = None) -> Tensor:
    """See `octavo_kernels.lora_shrink`."""
    library, dtype = get_library(), DTYPES.get(x.dtype)
    if library is None or dtype is None or x.stride(1) != 1:
        return reference.lora_shrink(x, table, slots)
    out = torch.empty(len(x), table.width, dtype=torch.float32)
    op = library.pack(
        "lora_shrink", x.data_ptr(), slots.data_ptr(), table.ranks.data_ptr(), table.a_addresses.data_ptr(),
        out.data_ptr(), len(x), x.stride(0), x.shape[1], table.parts, table.width, dtype, DTYPES[table.dtype],
    )  # fmt: skip
    library.run(op, threads_for(x.numel() * table.width))
    return out


def lora_gather(ids: Tensor, table: AdapterTable, slots: Tensor, first: int, count: int) -> Tensor:
    """See `octavo_kernels.lora_gather`."""
    library = get_library()
    if library is None:
        return reference.lora_gather(ids, table, slots, first, count)
    out = torch.empty(len(ids), table.width, dtype=torch.float32)
    op = library.pack(
        "lora_gather", ids.data_ptr(), slots.data_ptr(), table.ranks.data_ptr(), table.a_addresses.data_ptr(),
        out.data_ptr(), len(ids), first, count, table.width, DTYPES[table.dtype],
    )  # fmt: skip
    library.run(op, threads_for(out.numel()))
    return out


def lora_expand_(y: Tensor, h: Tensor, table: AdapterTable, slots: Tensor, tiles: RowTiles | None = None) -> None:
    """See `octavo_kernels.lora_expand_`."""
    library, dtype = get_library(), DTYPES.get(y.dtype)
    if library is None or dtype is None or y.stride(1) != 1 or h.dtype != torch.float32:
        return reference.lora_expand_(y, h, table, slots)
    op = library.pack(
        "lora_expand", y.data_ptr(), h.data_ptr(), slots.data_ptr(), table.ranks.data_ptr(),
        table.b_addresses.data_ptr(), table.offsets.data_ptr(), len(y), y.stride(0), table.parts, table.width, dtype,
        DTYPES[table.dtype],
    )  # fmt: skip
    library.run(op, threads_for(y.numel() * table.max_rank))
