"""Low-rank adapters, each row with its own."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from octavo_kernels.lora import AdapterTable, RowTiles


def lora_tiles(slots: Tensor, num_slots: int) -> RowTiles | None:
    """See `octavo_kernels.lora_tiles`; here there are none."""
    return None


def lora_shrink(x: Tensor, table: AdapterTable, slots: Tensor, tiles: RowTiles | None = None) -> Tensor:
    """See `octavo_kernels.lora_shrink`."""
    wide = _wide(x.dtype)
    out = torch.zeros(len(x), table.width, dtype=wide, device=x.device)
    for slot, a in _used(table.a, slots):
        rows = (slots == slot).nonzero()[:, 0]
        # Not a matrix product, whose sums depend on how many rows there are.
        out[rows, : len(a)] = (x[rows, None].to(wide) * a.to(wide)).sum(-1)
    return out


def lora_gather(ids: Tensor, table: AdapterTable, slots: Tensor, first: int, count: int) -> Tensor:
    """See `octavo_kernels.lora_gather`."""
    out = torch.zeros(len(ids), table.width, dtype=torch.float32, device=ids.device)
    for slot, a in _used(table.a, slots):
        held = (slots == slot) & (ids >= first) & (ids < first + count)
        out[held, : a.shape[1]] = a[ids[held] - first].float()
    return out


def lora_expand_(y: Tensor, h: Tensor, table: AdapterTable, slots: Tensor, tiles: RowTiles | None = None) -> None:
    """See `octavo_kernels.lora_expand_`."""
    offsets = table.offsets.tolist()
    for slot, b in _used(table.b, slots):
        rows, rank = (slots == slot).nonzero()[:, 0], len(b)
        for part, (start, end) in enumerate(pairwise(offsets)):
            factors = h[rows, part * rank : (part + 1) * rank]
            added = (factors[:, :, None] * b[:, start:end].to(h.dtype)).sum(1)
            y[rows, start:end] = (y[rows, start:end].to(h.dtype) + added).to(y.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _used(weights: list[Tensor | None], slots: Tensor) -> list[tuple[int, Tensor]]:
    return [(slot, w) for slot, w in enumerate(weights) if w is not None and bool((slots == slot).any())]
