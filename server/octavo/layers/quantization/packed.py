"""Packing of a checkpoint's codes for the CPU's kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from octavo.layers.quantization.canonical import GroupCodes, StoredWeight, TableCodes
from octavo_kernels.packing import pack_codes, pack_w8
from octavo_kernels.quant import GROUP, PackedLinear

_MAX_SCALE = 6e4  # float16's, about


def pack_stored(weight: StoredWeight, activation_terms: int) -> PackedLinear:
    """The weight's own codes where the kernels have their kind: integers of 4 or 8 bits in groups of whole 32 columns,
    8-bit ones around their middle. Anything else as 8-bit codes of its values. Act order is left to the caller: the
    columns are those of ``codes``. Raises ValueError for values that 8 bits cannot hold."""
    if not keeps_values(weight):
        ordered = replace(weight, order=None) if isinstance(weight, GroupCodes) else weight
        return pack_w8(ordered.dequantize(), activation_terms)
    if isinstance(weight, TableCodes):
        weight = _as_integers(weight)
    assert isinstance(weight, GroupCodes)
    rows, width = weight.shape
    groups = -(-width // GROUP)
    codes = weight.codes
    if groups * GROUP != width:
        codes = torch.nn.functional.pad(codes, (0, groups * GROUP - width), value=weight.zero)
    scales = _repeat(weight.scales, weight.group, groups)
    if not bool((scales.abs() < _MAX_SCALE).all()):
        raise ValueError(f"scale {scales.abs().max().item():g} is beyond what the kernels hold, {_MAX_SCALE:g}")
    minima = None
    if weight.zeros is not None:
        minima = _repeat(-weight.zeros.float() * weight.scales.float(), weight.group, groups)
    packed = pack_codes(
        codes.reshape(rows, groups, GROUP), scales, minima, bits=weight.bits, activation_terms=activation_terms
    )
    return replace(packed, width=width)


def keeps_values(weight: StoredWeight) -> bool:
    """Whether `pack_stored` keeps the weight's values, by its own codes or by others."""
    if isinstance(weight, TableCodes):
        return weight.group % GROUP == 0 and _is_of_halves(weight.table)
    if not isinstance(weight, GroupCodes):
        return False
    whole = weight.group % GROUP == 0 or weight.scales.shape[1] == 1
    return whole and (weight.bits == 4 or (weight.bits == 8 and weight.zeros is None))


def _is_of_halves(table: Tensor) -> bool:
    """Whether twice the numbers of a table are 8-bit integers, as in e2m1."""
    return torch.equal(table * 2, (table * 2).round()) and bool(table.abs().amax() < 64)


def _as_integers(weight: TableCodes) -> GroupCodes:
    """The same values as 8-bit integers, of a table of halves.

    The kernels have a kind for tables, in half the bytes, but it rounds sums too coarsely for activations with
    outliers: SmolLM2 in MXFP4 is 3.5e-2 nats from its values with it, 3e-3 with integers.
    """
    codes = (weight.table * 2 + 128).to(torch.uint8)[weight.codes.int()]
    return GroupCodes(codes, weight.scales / 2, weight.group, None, None, 8)


def _repeat(numbers: Tensor, group: int, groups: int) -> Tensor:
    """Numbers of groups of ``group`` columns, ``[N, G]``, for each of ``groups`` groups of 32: ``[N, groups]``."""
    if numbers.shape[1] == 1:
        return numbers.expand(-1, groups)
    return numbers.repeat_interleave(group // GROUP, dim=1)[:, :groups]
