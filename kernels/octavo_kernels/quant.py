"""Group-quantised weights: packing, and products with activations that are quantised row by row as they come.

A weight is held in groups of 32 columns, each with its scale, as 8-bit codes (W8A8) or as the 4-bit codes of a GGUF
file (W4A8). Activations become int8 with one scale for each group of 32 of a row; sums within a group are exact
integers, groups are added in their order, so a row's result never depends on the other rows. The layout of the packed
bytes, and what becomes of a file's scales, is described in cpu/csrc/quant.h.

One int8 ``term`` costs about as much as the 8-bit weights do in accuracy; with ``terms=2`` activations have 15 bits (a
second int8 for what the first leaves over) for twice the arithmetic; of the 15, products of 4-bit weights keep some 11.
Of a head's logits only the best need them: with a ``margin`` the others make do with one term.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

GROUP = 32  # columns with one scale
STRIP = 16  # channels that lie together
BLOCK = 32  # what their number is padded to
ZERO = {4: 8, 8: 128}  # the code that stands for 0, by bits
SCALE_BITS, LEAST_BITS, SHARE_BITS = 15, 9, 11  # of integers beside their channel's unit or their row's largest scale


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
    terms: int = 1
    margin: float = 0.0

    def __post_init__(self) -> None:
        if self.margin and (self.terms != 2 or len(self.parts) != 1):
            raise ValueError(f"margin: is for one part and two terms, not {len(self.parts)} and {self.terms}")

    @property
    def groups(self) -> int:
        return num_groups(self.width)

    @property
    def nbytes(self) -> int:
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
        return self.pairs.shape[1]


def num_groups(width: int) -> int:
    """The groups of a row: always even, as the kernels take two at a time."""
    return -(-width // (2 * GROUP)) * 2


def empty_rows(rows: int, terms: int, width: int, dtype: torch.dtype) -> QuantizedRows:
    """What a kernel fills."""
    groups = num_groups(width)
    pairs = torch.empty((rows, terms, groups // 2, 16 + 2 * GROUP), dtype=torch.uint8)
    return QuantizedRows(pairs, torch.empty((rows, 4 * groups + 16), dtype=torch.float32), width, dtype)


# ---------------------------------------------------------------- packing


def packed_nbytes(channels: int, width: int, qtype: str | None = None) -> int:
    """Bytes of a weight ``[channels, width]`` once it is packed: by `pack_gguf` if it is of such a ``qtype``, else by
    `pack_w8`."""
    bits = _READERS[qtype][3] if qtype in _READERS else 8
    numbers = 2 if qtype in _AFFINE else 1  # of 16 bits, for each group
    pair = STRIP * 2 * GROUP * bits // 8 + STRIP * 2 * 2 * numbers
    strip = (STRIP * 4 if bits == 4 else 0) + num_groups(width) // 2 * pair
    return -(-channels // BLOCK) * (BLOCK // STRIP) * strip


def pack_codes(
    codes: Tensor, scales: Tensor, minima: Tensor | None = None, *, bits: int, terms: int = 1
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
        return _packed(None, [*stream, _bytes(by_vector, 2)], channels, groups, 8, False, terms)
    wide = scales.float()
    least = None
    if minima is not None:
        least = torch.nn.functional.pad(minima.to(torch.float16), fill).float() + ZERO[4] * wide
    top = wide.abs() if least is None else torch.maximum(wide.abs(), least.abs() * 2.0 ** (LEAST_BITS - SHARE_BITS))
    exponents = (top.amax(dim=1).view(torch.int32) & 0x7F800000) + 0x800000  # the next power of two
    unit = torch.where(top.isfinite().all(dim=1), exponents.view(torch.float32), torch.nan)
    unit[channels:] = 0.0
    for values, fraction, highest in ((wide, SCALE_BITS, 32767), (least, LEAST_BITS, (1 << SHARE_BITS) - 1)):
        if values is not None:
            integers = (values / unit[:, None] * 2.0**fraction).nan_to_num(0.0).round().clamp(-highest, highest)
            stream.append(_bytes(integers.to(torch.int16).view(count, STRIP, pairs, 2).transpose(1, 2), 2))
    return _packed(unit, stream, channels, groups, 4, least is not None, terms)


def _bytes(values: Tensor, dims: int) -> Tensor:
    """uint8 [*shape[:dims], the rest's bytes]"""
    return values.contiguous().view(torch.uint8).flatten(dims)


def _packed(
    unit: Tensor | None, stream: list[Tensor], channels: int, groups: int, bits: int, affine: bool, terms: int
) -> PackedLinear:
    data = torch.cat(stream, dim=2).flatten(1)
    if unit is not None:
        data = torch.cat([_bytes(unit.view(-1, STRIP), 1), data], dim=1)
    return PackedLinear((PackedPart(data.flatten(), channels, bits, affine),), channels, groups * GROUP, terms)


def pack_w8(weight: Tensor, terms: int = 1) -> PackedLinear:
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
    packed = pack_codes(torch.cat([c for c, _ in pieces]), torch.cat([s for _, s in pieces]), bits=8, terms=terms)
    return PackedLinear(packed.parts, channels, width, terms)


def pack_gguf(raw: np.ndarray, qtype: str, shape: Sequence[int], terms: int = 1) -> PackedLinear:
    """Pack rows of a GGUF tensor as the file has them: ``raw`` uint8 [N, row bytes], ``shape`` (N, K).

    The codes are the file's own, and so are scales of 8 bits. Those of 4 bits and minima become 16-bit integers beside
    their channel's largest (cpu/csrc/quant.h), Q4_K's after their products were rounded to float16.
    Raises ValueError for a type that is not in `GGUF_TYPES` (dequantise it and use `pack_w8`) or bytes that do not fit.
    """
    channels, width = shape
    if qtype not in _READERS:
        raise ValueError(f"qtype: {qtype!r} is not packed as it is; known: {', '.join(GGUF_TYPES)}")
    reader, block_width, block_bytes, bits = _READERS[qtype]
    if width % block_width or raw.shape != (channels, width // block_width * block_bytes):
        raise ValueError(f"raw: {tuple(raw.shape)} bytes are not a {qtype} tensor of shape ({channels}, {width})")
    from octavo_kernels import cpu

    data = cpu.pack_gguf(raw, qtype, channels, width // GROUP)
    if data is not None:
        return PackedLinear((PackedPart(data, channels, bits, qtype == "Q4_1"),), channels, width, terms)
    blocks = torch.from_numpy(np.array(raw)).view(channels, -1, block_bytes)
    codes, scales, minima = reader(blocks)
    return pack_codes(codes.reshape(channels, -1, GROUP), scales, minima, bits=bits, terms=terms)


def concat(packed: Sequence[PackedLinear]) -> PackedLinear:
    """Weights of one width stacked along the channels; neighbours of one kind become one part."""
    first = packed[0]
    if any(p.width != first.width or p.terms != first.terms for p in packed):
        raise ValueError("packed: weights to be stacked differ in width or in terms")
    parts: list[PackedPart] = []
    for part in (part for p in packed for part in p.parts):
        last = parts[-1] if parts else None
        if last and (last.bits, last.affine) == (part.bits, part.affine) and last.channels % BLOCK == 0:
            data = torch.cat([last.data, part.data])
            parts[-1] = PackedPart(data, last.channels + part.channels, part.bits, part.affine)
        else:
            parts.append(part)
    return PackedLinear(tuple(parts), sum(p.channels for p in packed), first.width, first.terms)


# Readers of GGUF blocks: uint8 [N, blocks, bytes] -> codes [N, blocks * groups, 32], scales and minima [N, groups]
# float16. The formats are those of ggml (https://github.com/ggml-org/ggml, ggml-common.h).

_Read = tuple[Tensor, Tensor, Tensor | None]


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16)[:, :, 0]


def _nibbles(bytes_: Tensor) -> Tensor:
    return torch.cat([bytes_ & 15, bytes_ >> 4], dim=-1)


def _read_q4_0(blocks: Tensor) -> _Read:
    return _nibbles(blocks[:, :, 2:]), _half(blocks, 0), None


def _read_q4_1(blocks: Tensor) -> _Read:
    return _nibbles(blocks[:, :, 4:]), _half(blocks, 0), _half(blocks, 2)


def _read_q5_0(blocks: Tensor) -> _Read:
    shifts = torch.arange(8, dtype=torch.uint8)
    fifth = (blocks[:, :, 2:6, None] >> shifts & 1).flatten(2)
    return (_nibbles(blocks[:, :, 6:]) | fifth << 4) + (128 - 16), _half(blocks, 0), None


def _read_q8_0(blocks: Tensor) -> _Read:
    return blocks[:, :, 2:] ^ 128, _half(blocks, 0), None


def _read_q4_k(blocks: Tensor) -> _Read:
    """256 values: eight groups of 32 with 6-bit scales and minima, each times the block's own scale."""
    six = blocks[:, :, 4:16]
    low, high, rest = six[:, :, :4], six[:, :, 4:8], six[:, :, 8:]
    scales = torch.cat([low & 63, (rest & 15) | (low >> 6 << 4)], dim=2)
    minima = torch.cat([high & 63, (rest >> 4) | (high >> 6 << 4)], dim=2)
    codes = blocks[:, :, 16:].unflatten(2, (4, 32))
    codes = torch.stack([codes & 15, codes >> 4], dim=3)
    scale = _half(blocks, 0).float()[:, :, None] * scales.float()
    least = -_half(blocks, 2).float()[:, :, None] * minima.float()
    return codes, scale.flatten(1).to(torch.float16), least.flatten(1).to(torch.float16)


# type: reader, values in a block, bytes of a block, bits of the packed codes
_READERS: dict[str, tuple[Callable[[Tensor], _Read], int, int, int]] = {
    "Q4_0": (_read_q4_0, 32, 18, 4),
    "Q4_1": (_read_q4_1, 32, 20, 4),
    "Q4_K": (_read_q4_k, 256, 144, 4),
    "Q5_0": (_read_q5_0, 32, 22, 8),
    "Q8_0": (_read_q8_0, 32, 34, 8),
}
GGUF_TYPES = tuple(_READERS)
_AFFINE = ("Q4_1", "Q4_K")  # with minima


# ---------------------------------------------------------------- unpacking


@dataclass(frozen=True)
class Unpacked:
    """What a part's bytes mean: ``codes`` int8 [N, G, 32] about zero; ``scales`` and, if affine, ``leasts`` [N, G],
    float32 for 8 bits, for 4 bits int16 beside ``units`` float32 [N] (None for 8).
    """

    codes: Tensor
    scales: Tensor
    leasts: Tensor | None
    units: Tensor | None

    def values(self) -> Tensor:
        """The weight, float32 [N, G * 32]."""
        codes = self.codes.float()
        if self.units is None:
            return (codes * self.scales[:, :, None]).flatten(1)
        out = codes * (self.units[:, None] * 2.0**-SCALE_BITS * self.scales.float())[:, :, None]
        if self.leasts is not None:
            out = out + (self.units[:, None] * 2.0**-LEAST_BITS * self.leasts.float())[:, :, None]
        return out.flatten(1)


def unpack_part(part: PackedPart, groups: int) -> Unpacked:
    pairs, code_bytes, scale_bytes = groups // 2, STRIP * GROUP * 2 * part.bits // 8, STRIP * 2 * 2
    stream = part.data.view(-(-part.channels // BLOCK) * (BLOCK // STRIP), -1)
    units = None
    if part.bits == 4:
        units = stream[:, : STRIP * 4].contiguous().view(torch.float32).flatten()[: part.channels]
        stream = stream[:, STRIP * 4 :]
    stream = stream.unflatten(1, (pairs, code_bytes + scale_bytes * (1 + part.affine)))
    codes = stream[:, :, :code_bytes].unflatten(2, (part.bits, 2, 4, 2, 2, 4))
    if part.bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], dim=2)
    # [strip, pair, step, n, four of channels, channel, group, column], see pack_codes
    signed = (codes.to(torch.int16) - ZERO[part.bits]).to(torch.int8)
    codes = signed.permute(0, 4, 3, 5, 1, 6, 2, 7).reshape(-1, groups, GROUP)[: part.channels]

    def numbers(at: int, dtype: torch.dtype) -> Tensor:
        return stream[:, :, at : at + scale_bytes].contiguous().view(dtype)

    if part.bits == 8:
        halves = numbers(code_bytes, torch.float16).unflatten(2, (2, 4, 2, 2)).permute(0, 3, 2, 4, 1, 5)
        return Unpacked(codes, halves.reshape(-1, groups)[: part.channels].float(), None, None)

    def integers(at: int) -> Tensor:
        by_pair = numbers(at, torch.int16).unflatten(2, (STRIP, 2))
        return by_pair.transpose(1, 2).reshape(-1, groups)[: part.channels]

    leasts = integers(code_bytes + scale_bytes) if part.affine else None
    return Unpacked(codes, integers(code_bytes), leasts, units)


def dequantize(packed: PackedLinear) -> Tensor:
    """The weight that the packed bytes stand for, float32 ``[channels, width]``."""
    return torch.cat([unpack_part(part, packed.groups).values() for part in packed.parts])[:, : packed.width]
