"""Packing of a checkpoint's codes for the CPU's kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from octavo.layers.quantization.canonical import FloatCodes, GroupCodes, StoredWeight, TableCodes
from octavo_kernels.packing import pack_codes, pack_row_scaled, pack_w8
from octavo_kernels.quant import BY_ROW, GROUP, TABLE_ZERO, PackedLinear

_MAX_SCALE = 6e4  # float16's, about


def pack_stored(weight: StoredWeight, activation_terms: int) -> PackedLinear:
    """The weight's own codes where the kernels have their kind: integers of 4 or 8 bits in groups of whole 32 columns,
    8-bit ones around their middle, and places in tables of 16 numbers in such groups or in halves of them. Anything
    else as 8-bit codes of its values. Act order is left to the caller: the columns are those of ``codes``. Raises
    ValueError for values that 8 bits cannot hold. With `BY_ROW` for terms the weight has one scale a row."""
    if activation_terms == BY_ROW:
        assert isinstance(weight, GroupCodes)
        return _pack_row_scaled(weight)
    if not keeps_codes(weight):
        ordered = replace(weight, order=None) if isinstance(weight, GroupCodes) else weight
        return pack_w8(ordered.dequantize(), activation_terms)
    if isinstance(weight, TableCodes):
        return _pack_table(weight, activation_terms)
    assert isinstance(weight, GroupCodes)
    groups = -(-weight.shape[1] // GROUP)
    scales = _repeat(weight.scales, weight.group, groups)
    if not bool((scales.abs() < _MAX_SCALE).all()):
        raise ValueError(f"scale {scales.abs().max().item():g} is beyond what the kernels hold, {_MAX_SCALE:g}")
    minima = None
    if weight.zeros is not None:
        minima = _repeat(-weight.zeros.float() * weight.scales.float(), weight.group, groups)
    codes = _in_groups(weight.codes, groups, weight.zero)
    packed = pack_codes(codes, scales, minima, bits=weight.bits, activation_terms=activation_terms)
    return replace(packed, width=weight.shape[1])


def _pack_row_scaled(weight: GroupCodes) -> PackedLinear:
    scales = weight.scales[:, 0].float()
    if not bool(scales.isfinite().all()):
        raise ValueError("scales: must be finite")
    return pack_row_scaled(weight.codes, scales)


def keeps_codes(weight: StoredWeight) -> bool:
    """True if `pack_stored` keeps the weight's own codes."""
    if isinstance(weight, FloatCodes):
        return False
    assert isinstance(weight, GroupCodes | TableCodes)
    whole = weight.group % GROUP == 0 or weight.scales.shape[1] == 1
    if isinstance(weight, TableCodes):
        return whole or weight.group == GROUP // 2
    return whole and (weight.bits == 4 or (weight.bits == 8 and weight.zeros is None))


def _pack_table(weight: TableCodes, activation_terms: int) -> PackedLinear:
    rows, width = weight.shape
    groups = -(-width // GROUP)
    table, step = _as_integers(weight.table)
    scales = weight.scales.float() * step
    if not bool(scales.isfinite().all()):
        raise ValueError("scales: must be finite")
    if weight.group == GROUP // 2:
        scales = torch.nn.functional.pad(scales, (0, 2 * groups - scales.shape[1])).view(rows, groups, 2)
    else:
        scales = _repeat(scales, weight.group, groups)
    codes = _in_groups(weight.codes, groups, 0)
    packed = pack_codes(codes, scales, bits=4, table=table, activation_terms=activation_terms)
    return replace(packed, width=width)


def _as_integers(table: Tensor) -> tuple[list[int], float]:
    """A table as integers from -127 to 127 and the size of their unit: exact for halves, as in e2m1, otherwise the
    unit that leaves the smallest errors."""
    exact = table.double() * 2
    if torch.equal(exact, exact.round()) and 0 < exact.abs().amax() < TABLE_ZERO:
        return [int(number) for number in exact.tolist()], 0.5
    largest = table.abs().amax().item()
    if not 0 < largest < float("inf"):
        raise ValueError("table: must be finite numbers, not all 0")
    units = largest / torch.linspace(TABLE_ZERO // 2, TABLE_ZERO - 1, 1024, dtype=torch.float64)
    rounded = (table.double() / units[:, None]).round()
    best = int((rounded * units[:, None] - table.double()).square().sum(dim=1).argmin())
    return [int(number) for number in rounded[best].tolist()], units[best].item()


def _in_groups(codes: Tensor, groups: int, fill: int) -> Tensor:
    """``[N, K]`` as ``[N, groups, 32]``, with ``fill`` after the last column."""
    missing = groups * GROUP - codes.shape[1]
    return torch.nn.functional.pad(codes, (0, missing), value=fill).view(-1, groups, GROUP)


def _repeat(numbers: Tensor, group: int, groups: int) -> Tensor:
    """Repeat the numbers of groups of ``group`` columns, ``[N, G]``, for each of ``groups`` groups of 32: ``[N,
    groups]``."""
    if numbers.shape[1] == 1:
        return numbers.expand(-1, groups)
    return numbers.repeat_interleave(group // GROUP, dim=1)[:, :groups]
