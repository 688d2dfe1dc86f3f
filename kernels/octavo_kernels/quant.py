"""Group-quantised weights and activations: how they lie in memory (`octavo_kernels.packing` makes them from files).

A weight is held in groups of 32 columns, each with its scale, as 8-bit codes (W8A8) or as the 4-bit codes of a GGUF
file (W4A8). Activations become int8 with one scale for each group of 32 of a row; sums within a group are exact
integers, groups are added in their order, so a row's result never depends on the other rows. The layout of the packed
bytes, and what becomes of a file's scales, is described in cpu/csrc/quant.h.

One int8 ``term`` costs about as much as the 8-bit weights do in accuracy; with ``terms=2`` activations have 15 bits (a
second int8 for what the first leaves over) for twice the arithmetic; of the 15, products of 4-bit weights keep some 11.
Of a head's logits only the best need them: with a ``margin`` the others make do with one term.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32  # columns with one scale
STRIP = 16  # channels that lie together
BLOCK = 32  # what their number is padded to
ZERO_POINT = {4: 8, 8: 128}  # the code that stands for 0, by bits
SCALE_BITS, OFFSET_BITS, RELATIVE_BITS = (
    15,
    9,
    11,
)  # of integers beside their channel's unit or their row's largest scale


@dataclass(frozen=True)
class PackedPart:
    """Channels of one kind. ``data`` uint8 is what the kernels read."""

    data: Tensor
    channels: int
    bits: int  # 4 or 8
    affine: bool  # has minima: scale * (q - zero) + least instead of scale * (q - zero)


@dataclass(frozen=True)
class PackedLinear:
    """A quantised weight ``[channels, width]``: parts one after the other, as merged layers have several kinds.

    ``margin`` above 0, for one part and two terms (a head's): products are float32 whatever the rows' dtype, and of
    each row only those BLOCKs of channels are computed with the second term that have a product within ``margin`` of
    the row's largest (by the first term alone).
    """

    parts: tuple[PackedPart, ...]
    channels: int
    width: int
    activation_terms: int = 1
    margin: float = 0.0

    def __post_init__(self) -> None:
        if self.margin and (self.activation_terms != 2 or len(self.parts) != 1):
            raise ValueError(
                f"margin: is for one part and two terms, not {len(self.parts)} and {self.activation_terms}"
            )

    @property
    def groups(self) -> int:
        """The groups of a row, padding included."""
        return num_groups(self.width)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.data.numel() for part in self.parts)


@dataclass(frozen=True)
class QuantizedRows:
    """Activations ``[T, width]`` as the kernels take them (cpu/csrc/quant.h: row_pair, row_meta), with an even number
    G of groups: ``pairs`` uint8 [T, terms, G / 2, 80], the integers of two groups and what comes of their sums;
    ``meta`` float32 [T, 4 G + 16], the groups' scales, the sums of both terms, whether they have a second one (the bits
    of int32), the largest scale, and room.
    """

    pairs: Tensor
    meta: Tensor
    width: int
    dtype: torch.dtype  # of the rows that were quantised, and of products with them

    @property
    def terms(self) -> int:
        """The int8 terms of each value: 1 or 2."""
        return self.pairs.shape[1]


def num_groups(width: int) -> int:
    """The groups of a row: always even, as the kernels take two at a time."""
    return -(-width // (2 * GROUP)) * 2


def empty_rows(rows: int, terms: int, width: int, dtype: torch.dtype) -> QuantizedRows:
    """What a kernel fills."""
    groups = num_groups(width)
    pairs = torch.empty((rows, terms, groups // 2, 16 + 2 * GROUP), dtype=torch.uint8)
    return QuantizedRows(pairs, torch.empty((rows, 4 * groups + 16), dtype=torch.float32), width, dtype)


def part_nbytes(channels: int, width: int, bits: int, affine: bool) -> int:
    """Bytes of the data of a `PackedPart`."""
    pair = STRIP * 2 * GROUP * bits // 8 + STRIP * 2 * 2 * (1 + affine)
    strip = (STRIP * 4 if bits == 4 else 0) + num_groups(width) // 2 * pair
    return -(-channels // BLOCK) * (BLOCK // STRIP) * strip


@dataclass(frozen=True)
class Unpacked:
    """What a part's bytes mean: ``codes`` int8 [N, G, 32] about zero; ``scales`` and, if affine, ``offsets`` [N, G],
    float32 for 8 bits, for 4 bits int16 beside ``units`` float32 [N] (None for 8).
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    units: Tensor | None

    def values(self) -> Tensor:
        """The weight, float32 [N, G * 32]."""
        codes = self.codes.float()
        if self.units is None:
            return (codes * self.scales[:, :, None]).flatten(1)
        out = codes * (self.units[:, None] * 2.0**-SCALE_BITS * self.scales.float())[:, :, None]
        if self.offsets is not None:
            out = out + (self.units[:, None] * 2.0**-OFFSET_BITS * self.offsets.float())[:, :, None]
        return out.flatten(1)


def unpack_part(part: PackedPart, groups: int) -> Unpacked:
    """The codes, scales and offsets that the bytes of ``part`` hold, in rows of ``groups`` groups."""
    pairs, code_bytes, scale_bytes = groups // 2, STRIP * GROUP * 2 * part.bits // 8, STRIP * 2 * 2
    stream: Tensor = part.data.view(-(-part.channels // BLOCK) * (BLOCK // STRIP), -1)
    units = None
    if part.bits == 4:
        units = stream[:, : STRIP * 4].contiguous().view(torch.float32).flatten()[: part.channels]
        stream = stream[:, STRIP * 4 :]
    stream = stream.unflatten(1, (pairs, code_bytes + scale_bytes * (1 + part.affine)))
    codes = stream[:, :, :code_bytes].unflatten(2, (part.bits, 2, 4, 2, 2, 4))
    if part.bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], dim=2)
    # [strip, pair, step, n, four of channels, channel, group, column], see pack_codes
    signed = (codes.to(torch.int16) - ZERO_POINT[part.bits]).to(torch.int8)
    codes = signed.permute(0, 4, 3, 5, 1, 6, 2, 7).reshape(-1, groups, GROUP)[: part.channels]

    def numbers(at: int, dtype: torch.dtype) -> Tensor:
        return stream[:, :, at : at + scale_bytes].contiguous().view(dtype)

    if part.bits == 8:
        halves: Tensor = numbers(code_bytes, torch.float16).unflatten(2, (2, 4, 2, 2)).permute(0, 3, 2, 4, 1, 5)
        return Unpacked(codes, halves.reshape(-1, groups)[: part.channels].float(), None, None)

    def integers(at: int) -> Tensor:
        by_pair: Tensor = numbers(at, torch.int16).unflatten(2, (STRIP, 2))
        return by_pair.transpose(1, 2).reshape(-1, groups)[: part.channels]

    offsets = integers(code_bytes + scale_bytes) if part.affine else None
    return Unpacked(codes, integers(code_bytes), offsets, units)


def dequantize(packed: PackedLinear) -> Tensor:
    """The weight that the packed bytes stand for, float32 ``[channels, width]``."""
    return torch.cat([unpack_part(part, packed.groups).values() for part in packed.parts])[:, : packed.width]
