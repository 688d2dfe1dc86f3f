"""Weights in 4-bit floating point (e2m1): MXFP4 with a power of two for 32 columns, NVFP4 with an e4m3 for 16.

Two codes lie in a byte, the first one in its low half. MXFP4's scales are exponents (e8m0, 127 stands for 1, 255 for
NaN); NVFP4's are multiplied by a float32 of the whole tensor, of which compressed-tensors stores the reciprocal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.errors import ModelError
from octavo.interface.config_checks import Fields
from octavo.layers.quantization.canonical import TableCodes
from octavo.layers.quantization.fp8 import ACTIVATION_LEAVES, read_e4m3, unread
from octavo.layers.quantization.skipped_modules import SkippedModules
from octavo.layers.quantization.weight_format import (
    CheckpointFormat,
    DeviceCodes,
    Leaf,
    Sources,
    StoredModule,
    WeightFormat,
    halves,
    num_groups_of,
    read_exponents,
)
from octavo_kernels.quant import Kind

_POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 = torch.tensor(_POSITIVE + [-number for number in _POSITIVE])


@dataclass(frozen=True)
class MXFP4Weight(WeightFormat):
    """``codes`` U8 [N, K / 2], or [N, K / 32, 16] as gpt-oss has it, and ``scales`` U8 [N, K / 32]."""

    device_codes = DeviceCodes(4, 32, 1)
    packed_kind = Kind(4, table=True)

    codes: str = "weight_packed"
    scales: str = "weight_scale"

    def leaves(self, rows: int, columns: int) -> list[Leaf]:
        """See `WeightFormat`."""
        groups = num_groups_of(columns, 32, "MXFP4")
        return [
            Leaf(self.codes, ((rows, columns // 2), (rows, groups, 16)), ("U8",)),
            Leaf(self.scales, ((rows, groups),), ("U8", "F8_E8M0")),
            *unread(ACTIVATION_LEAVES),
        ]

    def read(self, sources: Sources, rows: int, columns: int) -> TableCodes:
        """See `WeightFormat`."""
        codes = halves(sources[self.codes].load()).reshape(rows, columns)
        return TableCodes(codes, read_exponents(sources[self.scales]), 32, E2M1)


@dataclass(frozen=True)
class NVFP4Weight(WeightFormat):
    """``codes`` U8 [N, K / 2], ``weight_scale`` F8_E4M3 [N, K / 16] and the tensor's own, ``of_tensor`` F32, by which
    scales are multiplied, or divided where it is a ``reciprocal``."""

    device_codes = DeviceCodes(4, 16, 4)
    packed_kind = Kind(4, halves=True, table=True)

    codes: str
    of_tensor: str
    reciprocal: bool

    def leaves(self, rows: int, columns: int) -> list[Leaf]:
        """See `WeightFormat`."""
        groups = num_groups_of(columns, 16, "NVFP4")
        return [
            Leaf(self.codes, ((rows, columns // 2),), ("U8",)),
            Leaf("weight_scale", ((rows, groups),), ("F8_E4M3",)),
            Leaf(self.of_tensor, ((), (1,)), ("F32",)),
            *unread(ACTIVATION_LEAVES),
        ]

    def read(self, sources: Sources, rows: int, columns: int) -> TableCodes:
        """See `WeightFormat`."""
        of_tensor = sources[self.of_tensor].load().reshape(1, 1)
        if not bool(of_tensor > 0):
            raise ModelError(f"tensor {sources[self.of_tensor].name!r} must be above 0; fetch it again")
        scales = read_e4m3(sources["weight_scale"]).float()
        scales = scales / of_tensor if self.reciprocal else scales * of_tensor
        return TableCodes(halves(sources[self.codes].load()), scales, 16, E2M1)


class MXFP4(CheckpointFormat):
    """The format called mxfp4 by transformers: gpt-oss' blocks and scales."""

    name = "mxfp4"

    def __init__(self, fields: Fields) -> None:
        self._skipped = SkippedModules.from_fields(fields, "modules_to_not_convert")

    def weight_format(self, module: StoredModule) -> WeightFormat | None:
        """See `CheckpointFormat`."""
        return self._skipped.choose(module, "weight_blocks", MXFP4Weight("weight_blocks", "weight_scales"))
