"""Packing of a checkpoint's codes for the CPU's kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from octavo.layers.quantization.canonical import GroupCodes, StoredWeight
from octavo_kernels.packing import pack_codes, pack_w8
from octavo_kernels.quant import GROUP, ZERO_POINT, PackedLinear


def pack_stored(weight: StoredWeight, activation_terms: int) -> PackedLinear:
    """The weight's own codes where the kernels have their kind: 4 or 8 bits in groups of whole 32 columns, 8-bit ones
    around their middle. Anything else as 8-bit codes of its values. Act order is left to the caller: the columns are
    those of ``codes``."""
    if not isinstance(weight, GroupCodes) or not _has_kind(weight):
        return pack_w8(weight.dequantize(), activation_terms)
    rows, width = weight.shape
    groups = -(-width // GROUP)
    codes = weight.codes
    if groups * GROUP != width:
        codes = torch.nn.functional.pad(codes, (0, groups * GROUP - width), value=ZERO_POINT[weight.bits])
    scales = _repeat(weight.scales, weight.group, groups)
    minima = None
    if weight.zeros is not None:
        minima = _repeat(-weight.zeros.float() * weight.scales.float(), weight.group, groups)
    packed = pack_codes(
        codes.view(rows, groups, GROUP), scales, minima, bits=weight.bits, activation_terms=activation_terms
    )
    return replace(packed, width=width)


def _has_kind(weight: GroupCodes) -> bool:
    whole = weight.group % GROUP == 0 or weight.scales.shape[1] == 1
    return whole and (weight.bits == 4 or (weight.bits == 8 and weight.zeros is None))


def _repeat(numbers: Tensor, group: int, groups: int) -> Tensor:
    """Numbers of groups of ``group`` columns, ``[N, G]``, for each of ``groups`` groups of 32: ``[N, groups]``."""
    if numbers.shape[1] == 1:
        return numbers.expand(-1, groups)
    return numbers.repeat_interleave(group // GROUP, dim=1)[:, :groups]
