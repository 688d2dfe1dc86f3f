"""Low-rank adapters of one layer (Hu et al., 2021): ``y += B A x``, with A and B by row of the step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class AdapterTable:
    """The adapters of one layer, in slots. A layer has one or more ``parts``, as the products that a merged layer
    holds; each part has an A of its own and B for its own outputs.

    Its memory stays where it is: a recorded step may refer to it, and adapters come and go between steps.
    """

    def __init__(self, num_slots: int, max_rank: int, sizes: Sequence[int], dtype: torch.dtype) -> None:
        """``sizes``: outputs of each part; ``dtype``: of A and B, float32 or bfloat16."""
        self.max_rank, self.parts, self.dtype = max_rank, len(sizes), dtype
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
