"""AWQ (Lin et al., 2023) as AutoAWQ's "gemm" version writes it, in 4 bits.

``qweight`` int32 [K, N / 8] and ``qzeros`` int32 [K / group, N / 8] hold eight columns a word, in the order 0 2 4 6 1 3
5 7 from the lowest four bits on; ``scales`` float16 [K / group, N]. A zero point may be any of 0 to 15.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.errors import ModelError
from octavo.interface.config_checks import Fields
from octavo.layers.quantization.canonical import GroupCodes
from octavo.layers.quantization.skipped_modules import SkippedModules
from octavo.layers.quantization.weight_format import (
    FLOATS,
    CheckpointFormat,
    DeviceCodes,
    Leaf,
    Sources,
    StoredModule,
    WeightFormat,
    num_groups_of,
)
from octavo_kernels.quant import Kind

_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where in a word columns 0 to 7 are


class AWQWeight(WeightFormat):
    """See the module. ``group`` -1: one scale a row. ``has_zeros`` False: every zero point is 8."""

    def __init__(self, group: int, has_zeros: bool) -> None:
        self.group, self.has_zeros = group, has_zeros

    def leaves(self, rows: int, columns: int) -> list[Leaf]:
        """See `WeightFormat`."""
        if rows % 8:
            raise ModelError(f"AWQ packs 8 outputs into a word, and it has {rows}; use its unquantised weights")
        groups = num_groups_of(columns, self._group(columns), "AWQ")
        return [
            Leaf("qweight", ((columns, rows // 8),), ("I32",)),
            Leaf("qzeros", ((groups, rows // 8),), ("I32",), optional=not self.has_zeros),
            Leaf("scales", ((groups, rows),), FLOATS),
        ]

    def read(self, sources: Sources, rows: int, columns: int) -> GroupCodes:
        """See `WeightFormat`."""
        scales = sources["scales"].load().T.contiguous()
        zeros = _unpack(sources["qzeros"].load()) if self.has_zeros else None
        if zeros is not None and bool((zeros == 8).all()):
            zeros = None
        return GroupCodes(_unpack(sources["qweight"].load()), scales, self._group(columns), zeros, None, 4)

    @property
    def packed_kind(self) -> Kind:
        """See `WeightFormat`."""
        return Kind(4, affine=self.has_zeros)

    @property
    def device_codes(self) -> DeviceCodes:
        """See `WeightFormat`."""
        return DeviceCodes(4, max(0, self.group), 2 + self.has_zeros)

    def _group(self, columns: int) -> int:
        return columns if self.group == -1 else self.group


def _unpack(words: Tensor) -> Tensor:
    """int32 [k, N / 8] as uint8 [N, k]. Words are turned first: there are fewer of them."""
    count, outputs = words.shape
    by_byte = words.T.flatten().view(torch.uint8).view(outputs, count, 4).transpose(1, 2).contiguous()
    out = torch.empty(outputs, 8, count, dtype=torch.uint8)
    for column, place in enumerate(_PLACES):
        out[:, column] = by_byte[:, place // 2] >> 4 if place % 2 else by_byte[:, place // 2] & 15
    return out.flatten(0, 1)


class AWQ(CheckpointFormat):
    """A checkpoint of AutoAWQ or llm-awq."""

    name = "awq"

    def __init__(self, fields: Fields) -> None:
        described = fields.config
        version = str(described.get("version", "gemm")).lower()
        if version != "gemm":
            fields.refuse("version", "must be gemm, the only one whose weights are read; quantise the model with it")
        if described.get("bits", described.get("w_bit")) != 4:
            raise fields.error(f"{fields.name('bits')} must be 4, as AWQ has it, got {described.get('bits')!r}")
        group = described.get("group_size", described.get("q_group_size", -1))
        if group != -1:
            fields.integer("group_size" if "group_size" in described else "q_group_size", 1, 1 << 20)
        fields.flag("zero_point")
        self._format = AWQWeight(group, described.get("zero_point", True))
        self._skipped = SkippedModules.from_fields(fields, "modules_to_not_convert")

    def weight_format(self, module: StoredModule) -> WeightFormat | None:
        """See `CheckpointFormat`."""
        return self._skipped.choose(module, "qweight", self._format)
