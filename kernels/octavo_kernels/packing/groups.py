"""Packing of codes with a scale for each group of columns, and of floating-point weights as 8-bit codes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from octavo_kernels.quant import (
    BLOCK,
    GROUP,
    OFFSET_BITS,
    RELATIVE_BITS,
    SCALE_BITS,
    STRIP,
    TABLE_ZERO,
    Kind,
    PackedLinear,
    PackedPart,
    part_nbytes,
)

_PIECE = 1 << 19  # values of a weight that are packed at a time, so that copies of them are small


def pack_codes(
    codes: Tensor,
    scales: Tensor,
    minima: Tensor | None = None,
    *,
    bits: int,
    table: Sequence[int] | None = None,
    activation_terms: int = 1,
) -> PackedLinear:
    """Pack ``codes`` uint8 [N, G, 32], below 2^bits, with their scales: the weight ``scale * (code - 2^(bits - 1))``.

    With ``minima`` (2, 4 and 5 bits) the weight is ``scale * code + minimum``. With a ``table`` of 16 integers from
    -127 to 127 (4 bits) it is ``scale * table[code]``: the codes of IQ4_NL, MXFP4 (its values times two), NF4.

    ``scales`` and ``minima`` are [N, G] or [N, G, 2], one for each 16 columns (see `KINDS`). 8-bit codes keep
    them as float16, and so do tables with one scale a group, relative to the largest of their channel: 11 significant
    bits are exact down to 2^-29 of that. Others become integers beside the largest of their channel, within 2^-15 of
    it: powers of two and float16 numbers down to a thirty-second of the largest are exact. Raises ValueError for what
    no kernel takes.
    """
    channels, groups, _ = codes.shape
    kind = Kind(bits, affine=minima is not None, halves=scales.dim() == 3, table=table is not None)
    if kind not in KINDS or (minima is not None and minima.shape != scales.shape):
        raise ValueError(f"codes: no kernel takes {kind}")
    fill = (0, groups % 2, 0, -channels % BLOCK)
    stream = [_code_stream(_pad(codes, (0, 0, *fill)), kind)]
    count, pairs = stream[0].shape[:2]
    if bits == 8:
        stream.append(_half_stream(_pad(scales.to(torch.float16), fill)))
        return _packed([], stream, channels, groups, kind, activation_terms)
    head = []
    wide = scales.float().view(channels, groups, -1)
    if table is not None:
        integers, factor = _biased(table, kind)
        wide = wide / factor
        head = [torch.tensor(integers * 4, dtype=torch.uint8).expand(count, -1)]
    wide = _pad(wide, (0, 0, *fill)) * (2.0**kind.shift / kind.step)
    offsets = None
    top = wide.abs().amax(dim=2)
    if minima is not None:
        zero = kind.zero * kind.step * 2.0**-kind.shift
        offsets = _pad(minima.float().view(channels, groups, -1), (0, 0, *fill)) + zero * wide
        top = torch.maximum(top, offsets.abs().amax(dim=2) * 2.0 ** (OFFSET_BITS - RELATIVE_BITS))
    exponents = (top.amax(dim=1).view(torch.int32) & 0x7F800000) + 0x800000  # the next power of two
    if kind.has_float_scales:
        exponents = (exponents - (15 << 23)).clamp(min=0x800000)
    unit = torch.where(top.isfinite().all(dim=1), exponents.view(torch.float32), torch.nan)
    unit[channels:] = 0.0
    if kind.has_float_scales:
        relative = (wide[:, :, 0] / unit[:, None]).nan_to_num(0.0) + 0.0  # zeros lose their sign
        stream.append(_half_stream(relative.to(torch.float16)))
        return _packed([_bytes(unit.view(-1, STRIP), 1), *head], stream, channels, groups, kind, activation_terms)
    numbers = [(part, SCALE_BITS, 32767) for part in wide.unbind(2)]
    if offsets is not None:
        numbers += [(part, OFFSET_BITS, (1 << RELATIVE_BITS) - 1) for part in offsets.unbind(2)]
    for values, fraction, highest in numbers:
        integers_ = (values / unit[:, None] * 2.0**fraction).nan_to_num(0.0).round().clamp(-highest, highest)
        stream.append(_bytes(integers_.to(torch.int16).view(count, STRIP, pairs, 2).transpose(1, 2), 2))
    return _packed([_bytes(unit.view(-1, STRIP), 1), *head], stream, channels, groups, kind, activation_terms)


# Kinds for which the C kernels have tiles.
KINDS = (
    Kind(2, affine=True),
    Kind(2, affine=True, halves=True),
    Kind(4),
    Kind(4, affine=True),
    Kind(4, halves=True),
    Kind(4, table=True),
    Kind(4, halves=True, table=True),
    Kind(5),
    Kind(5, affine=True),
    Kind(6, halves=True),
    Kind(8),
)


def _code_stream(codes: Tensor, kind: Kind) -> Tensor:
    """uint8 [N, G, 32] -> [strips, pairs, bytes]; N and G are padded. Four columns, a step, are one number here."""
    steps = codes.contiguous().view(torch.int32)
    if kind.bits == 2:
        four = steps.unflatten(2, (4, 2))
        return _by_strip(four[:, :, 0] | four[:, :, 1] << 2 | four[:, :, 2] << 4 | four[:, :, 3] << 6)
    if kind.bits == 8:
        return _by_strip(steps)
    low = steps & 0x0F0F0F0F if kind.bits > 4 else steps
    stream = [_by_strip(low[:, :, :4] | low[:, :, 4:] << 4)]
    if kind.bits > 4:  # planes of the bits above: those of one step in each byte, of 8 or 4 steps
        extra = kind.bits - 4
        high = (steps >> 4 & 0x0F0F0F0F).unflatten(2, (-1, 8 // extra))
        plane = high[:, :, :, 0].clone()
        for i in range(1, 8 // extra):
            plane |= high[:, :, :, i] << extra * i
        stream.append(_by_strip(plane))
    return torch.cat(stream, dim=2)


def _by_strip(steps: Tensor) -> Tensor:
    """int32 [N, G, steps] -> uint8 [strips, pairs, bytes]"""
    # [strip, four of channels, n, channel, pair, group, step]; n: in which of two vectors the channel is
    vectors = steps.view(-1, 4, 2, 2, steps.shape[1] // 2, 2, steps.shape[2]).permute(0, 4, 6, 2, 1, 3, 5)
    return vectors.flatten(2).view(torch.uint8)


def _half_stream(scales: Tensor) -> Tensor:
    """float16 [N, G] -> [strips, pairs, bytes], in the order of the sums that they scale"""
    by_vector = scales.view(len(scales) // STRIP, 4, 2, 2, -1, 2).permute(0, 4, 2, 1, 3, 5)
    return _bytes(by_vector, 2)


def _biased(table: Sequence[int], kind: Kind) -> tuple[list[int], int]:
    """The table plus TABLE_ZERO and 1; where products lose low bits (`Kind.shift`), which should be zeros, the table
    times the largest power of two that 8 bits allow, and that power.

    Raises ValueError for numbers that 8 bits cannot hold.
    """
    largest = max(abs(value) for value in table)
    if len(table) != 16 or not 0 < largest < TABLE_ZERO:
        raise ValueError(f"table: must be 16 integers from -127 to 127, not all 0, got {list(table)}")
    factor = 1 << 7 - largest.bit_length() if kind.shift else 1
    return [value * factor + TABLE_ZERO for value in table], factor


def _pad(values: Tensor, fill: Sequence[int]) -> Tensor:
    """`torch.nn.functional.pad`, which copies even where there is nothing to add."""
    return torch.nn.functional.pad(values, tuple(fill)) if any(fill) else values


def _bytes(values: Tensor, dims: int) -> Tensor:
    """uint8 [*shape[:dims], the rest's bytes]"""
    return values.contiguous().view(torch.uint8).flatten(dims)


def _packed(
    head: list[Tensor], stream: list[Tensor], channels: int, groups: int, kind: Kind, activation_terms: int
) -> PackedLinear:
    data = torch.cat([*head, torch.cat(stream, dim=2).flatten(1)], dim=1).flatten()
    return PackedLinear((PackedPart(data, channels, kind),), channels, groups * GROUP, activation_terms)


def pack_w8(weight: Tensor, activation_terms: int = 1) -> PackedLinear:
    """Quantise a floating-point weight ``[N, K]`` to 8 bits, symmetric, one scale for each 32 columns of a channel.

    Raises ValueError for weights that are not finite or too large for a float16 scale.
    """
    return pack_w8_pieces([weight], (weight.shape[0], weight.shape[1]), activation_terms)


def pack_w8_pieces(
    pieces: Iterable[Tensor], shape: tuple[int, int], activation_terms: int = 1, out: Tensor | None = None
) -> PackedLinear:
    """`pack_w8` of a weight of ``shape`` (N, K) that comes some rows at a time, in order; a piece is read at once.
    ``out`` uint8 [`part_nbytes`] takes the packed bytes."""
    channels, width = shape
    groups = -(-width // GROUP)
    count = max(1, _PIECE // (groups * GROUP * BLOCK)) * BLOCK  # rows that are packed at a time
    codes = torch.empty(min(count, channels), groups, GROUP, dtype=torch.uint8)
    scales = torch.empty(min(count, channels), groups, dtype=torch.float16)
    data = torch.empty(part_nbytes(channels, width, Kind(8)), dtype=torch.uint8) if out is None else out
    rows = filled = end = 0
    for piece in pieces:
        while len(piece):
            some, piece = piece[: len(codes) - filled], piece[len(codes) - filled :]
            begin, filled, rows = filled, filled + len(some), rows + len(some)
            _round(some, codes[begin:filled], scales[begin:filled])
            if filled == len(codes) or rows == channels:
                packed = pack_codes(codes[:filled], scales[:filled], bits=8).parts[0].data
                begin, end, filled = end, end + len(packed), 0
                data[begin:end] = packed
    return PackedLinear((PackedPart(data, channels, Kind(8)),), channels, width, activation_terms)


def _round(rows: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Round some rows to ``codes`` uint8 [N, G, 32] and ``scales`` [N, G]. Raises ValueError, see `pack_w8`."""
    wide = _pad(rows.float(), (0, codes.shape[1] * GROUP - rows.shape[1])).view(codes.shape)
    highest = wide.abs().amax(dim=2)
    if not bool((highest < 65504 * 127).all()):
        raise ValueError("weight: holds values that are not finite, or beyond 8e6: they cannot be held in 8 bits")
    scale = scales.copy_(highest / 127)
    inverse = torch.where(scale > 0, 1.0 / scale.float(), torch.zeros_like(highest))
    codes.copy_((wide * inverse[:, :, None]).round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8))
    codes ^= Kind(8).zero


def concat(packed: Sequence[PackedLinear]) -> PackedLinear:
    """Stack weights of one width along the channels; neighbours of one kind become one part.

    Those that lie side by side in one tensor's memory already are not copied. Raises ValueError for different widths or
    activation terms.
    """
    first = packed[0]
    if any(p.width != first.width or p.activation_terms != first.activation_terms for p in packed):
        raise ValueError("packed: weights to be stacked differ in width or in activation terms")
    parts: list[PackedPart] = []
    for part in (part for p in packed for part in p.parts):
        last = parts[-1] if parts else None
        if last and last.kind == part.kind and last.channels % BLOCK == 0:
            parts[-1] = PackedPart(_joined(last.data, part.data), last.channels + part.channels, part.kind)
        else:
            parts.append(part)
    return PackedLinear(tuple(parts), sum(p.channels for p in packed), first.width, first.activation_terms)


def _joined(one: Tensor, other: Tensor) -> Tensor:
    """``one`` and then ``other``, flat and contiguous."""
    beside = one.storage_offset() + one.numel() == other.storage_offset()
    if beside and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr():
        return one.as_strided((one.numel() + other.numel(),), (1,))
    return torch.cat([one, other])
