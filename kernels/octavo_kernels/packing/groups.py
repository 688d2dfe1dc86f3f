"""Packing of codes with a scale for each group of columns, and of floating-point weights as 8-bit codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo_kernels.quant import (
    BLOCK,
    GROUP,
    OFFSET_BITS,
    RELATIVE_BITS,
    SCALE_BITS,
    STRIP,
    ZERO_POINT,
    PackedLinear,
    PackedPart,
)


def pack_codes(
    codes: Tensor, scales: Tensor, minima: Tensor | None = None, *, bits: int, activation_terms: int = 1
) -> PackedLinear:
    """Pack ``codes`` uint8 [N, G, 32] (below 2^bits), ``scales`` float16 [N, G] and, for 4 bits, ``minima`` or None."""
    channels, groups, _ = codes.shape
    fill = (0, groups % 2, 0, -channels % BLOCK)
    codes = torch.nn.functional.pad(codes, (0, 0, *fill))
    scales = torch.nn.functional.pad(scales.to(torch.float16), fill)
    # [strip, four of channels, n, channel, pair, group, step, column]; n: in which of two vectors the channel is
    strips = codes.view(-1, 4, 2, 2, codes.shape[1] // 2, 2, 8, 4).permute(0, 4, 6, 2, 1, 3, 5, 7)
    if bits == 4:
        strips = strips[:, :, :4] | (strips[:, :, 4:] << 4)
    count, pairs = strips.shape[:2]
    stream = [strips.reshape(count, pairs, -1)]
    if bits == 8:
        by_vector = scales.view(count, 4, 2, 2, pairs, 2).permute(0, 4, 2, 1, 3, 5)
        return _packed(None, [*stream, _bytes(by_vector, 2)], channels, groups, 8, False, activation_terms)
    wide = scales.float()
    offsets = None
    if minima is not None:
        offsets = torch.nn.functional.pad(minima.to(torch.float16), fill).float() + ZERO_POINT[4] * wide
    top = (
        wide.abs()
        if offsets is None
        else torch.maximum(wide.abs(), offsets.abs() * 2.0 ** (OFFSET_BITS - RELATIVE_BITS))
    )
    exponents = (top.amax(dim=1).view(torch.int32) & 0x7F800000) + 0x800000  # the next power of two
    unit = torch.where(top.isfinite().all(dim=1), exponents.view(torch.float32), torch.nan)
    unit[channels:] = 0.0
    for values, fraction, highest in ((wide, SCALE_BITS, 32767), (offsets, OFFSET_BITS, (1 << RELATIVE_BITS) - 1)):
        if values is not None:
            integers = (values / unit[:, None] * 2.0**fraction).nan_to_num(0.0).round().clamp(-highest, highest)
            stream.append(_bytes(integers.to(torch.int16).view(count, STRIP, pairs, 2).transpose(1, 2), 2))
    return _packed(unit, stream, channels, groups, 4, offsets is not None, activation_terms)


def _bytes(values: Tensor, dims: int) -> Tensor:
    """uint8 [*shape[:dims], the rest's bytes]"""
    return values.contiguous().view(torch.uint8).flatten(dims)


def _packed(
    unit: Tensor | None,
    stream: list[Tensor],
    channels: int,
    groups: int,
    bits: int,
    affine: bool,
    activation_terms: int,
) -> PackedLinear:
    data = torch.cat(stream, dim=2).flatten(1)
    if unit is not None:
        data = torch.cat([_bytes(unit.view(-1, STRIP), 1), data], dim=1)
    return PackedLinear(
        (PackedPart(data.flatten(), channels, bits, affine),), channels, groups * GROUP, activation_terms
    )


def pack_w8(weight: Tensor, activation_terms: int = 1) -> PackedLinear:
    """Quantise a floating-point weight ``[N, K]`` to 8 bits, symmetric, one scale for each 32 columns of a channel.

    Raises ValueError for weights that are not finite or too large for a float16 scale.
    """
    channels, width = weight.shape
    groups = -(-width // GROUP)
    pieces = []
    for rows in weight.split(8192):  # bounds the float32 copy
        wide = rows.float()
        if groups * GROUP != width:
            wide = torch.nn.functional.pad(wide, (0, groups * GROUP - width))
        wide = wide.view(-1, groups, GROUP)
        highest = wide.abs().amax(dim=2)
        if not bool((highest < 65504 * 127).all()):
            raise ValueError("weight: holds values that are not finite, or beyond 8e6: they cannot be held in 8 bits")
        scales = (highest / 127).to(torch.float16)
        inverse = torch.where(scales > 0, 1.0 / scales.float(), torch.zeros_like(highest))
        codes = (wide * inverse[:, :, None]).round().clamp(-127, 127).to(torch.int8).view(torch.uint8) ^ 128
        pieces.append((codes, scales))
    packed = pack_codes(
        torch.cat([c for c, _ in pieces]), torch.cat([s for _, s in pieces]), bits=8, activation_terms=activation_terms
    )
    return PackedLinear(packed.parts, channels, width, activation_terms)


def concat(packed: Sequence[PackedLinear]) -> PackedLinear:
    """Stack weights of one width along the channels; neighbours of one kind become one part.

    Raises ValueError for different widths or activation terms.
    """
    first = packed[0]
    if any(p.width != first.width or p.activation_terms != first.activation_terms for p in packed):
        raise ValueError("packed: weights to be stacked differ in width or in activation terms")
    parts: list[PackedPart] = []
    for part in (part for p in packed for part in p.parts):
        last = parts[-1] if parts else None
        if last and (last.bits, last.affine) == (part.bits, part.affine) and last.channels % BLOCK == 0:
            data = torch.cat([last.data, part.data])
            parts[-1] = PackedPart(data, last.channels + part.channels, part.bits, part.affine)
        else:
            parts.append(part)
    return PackedLinear(tuple(parts), sum(p.channels for p in packed), first.width, first.activation_terms)
