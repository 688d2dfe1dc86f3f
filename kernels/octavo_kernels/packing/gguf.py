"""Packing of GGUF tensors with the file's own codes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo_kernels import cpu
from octavo_kernels.packing.groups import pack_codes
from octavo_kernels.quant import BLOCK, GROUP, Kind, PackedLinear, PackedPart, part_nbytes


def packed_kind(qtype: str | None = None) -> Kind:
    """The kind that a weight is packed to: by `pack_gguf` if it takes ``qtype``, else by `pack_w8`."""
    form = FORMATS.get(qtype or "")
    return form.kind if form else Kind(8)


def block_width(qtype: str) -> int:
    """The number of columns that a GGUF type of `GGUF_TYPES` stores together."""
    return FORMATS[qtype].block_width


def packed_nbytes(channels: int, width: int, qtype: str | None = None) -> int:
    """Bytes of a packed weight ``[channels, width]``, see `packed_kind`."""
    return part_nbytes(channels, width, packed_kind(qtype))


def pack_gguf(
    raw: np.ndarray | Iterable[np.ndarray],
    qtype: str,
    shape: Sequence[int],
    activation_terms: int = 1,
    out: Tensor | None = None,
) -> PackedLinear:
    """Pack rows of a GGUF tensor, in the bytes of the file: ``raw`` uint8 [N, row bytes], ``shape`` (N, K).

    The rows may come some at a time, a multiple of `BLOCK` but for the last; a piece is read at once. ``out`` uint8
    [`packed_nbytes`] takes the packed bytes.
    The codes are the file's own, and so are scales of 8-bit types. Scales and minima of other types become 16-bit
    integers relative to their channel's largest (cpu/csrc/quant.h). Raises ValueError for a type that is not in
    `GGUF_TYPES` (dequantise it and use `pack_w8`) and for bytes that do not fit.
    """
    channels, width = shape
    if qtype not in FORMATS:
        raise ValueError(f"qtype: {qtype!r} cannot be packed; known: {', '.join(GGUF_TYPES)}")
    form = FORMATS[qtype]
    data = torch.empty(packed_nbytes(channels, width, qtype), dtype=torch.uint8) if out is None else out
    rows, at, row_bytes = 0, 0, width // form.block_width * form.block_bytes
    for piece in [raw] if isinstance(raw, np.ndarray) else raw:
        if width % form.block_width or piece.shape[1:] != (row_bytes,) or rows % BLOCK or rows + len(piece) > channels:
            raise ValueError(
                f"raw: {tuple(piece.shape)} bytes after {rows} rows are not of a {qtype} tensor of shape "
                f"({channels}, {width})"
            )
        end = at + packed_nbytes(len(piece), width, qtype)
        if not cpu.pack_gguf(piece, qtype, width, form.kind, data[at:end]):
            data[at:end] = pack_blocks(torch.from_numpy(np.array(piece)), qtype).parts[0].data
        rows, at = rows + len(piece), end
    if rows != channels:
        raise ValueError(f"raw: {rows} rows are not a {qtype} tensor of shape ({channels}, {width})")
    return PackedLinear((PackedPart(data, channels, form.kind),), channels, width, activation_terms)


def pack_blocks(raw: Tensor, qtype: str, activation_terms: int = 1) -> PackedLinear:
    """`pack_gguf` in plain torch: ``raw`` uint8 [N, row bytes]."""
    form = FORMATS[qtype]
    codes, scales, minima = form.read(raw.view(len(raw), -1, form.block_bytes))
    codes = codes.reshape(len(raw), -1, GROUP)
    return pack_codes(codes, scales, minima, bits=form.kind.bits, table=form.table, activation_terms=activation_terms)


# Readers of GGUF blocks: uint8 [N, blocks, bytes] -> codes [N, blocks, values of a block], scales [N, groups] or
# [N, groups, 2] and minima, as many. The formats are those of ggml (https://github.com/ggml-org/ggml,
# ggml-common.h). Codes of symmetric types are such that the middle of their range is 0.

_Read = tuple[Tensor, Tensor, Tensor | None]
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # times two
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ1 = (-7, 1, 9, 0, -9, -1, 7, *[0] * 9)  # -1, 0 and 1, an eighth more, then an eighth less; times eight


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16)[:, :, 0]


def _planes(packed: Tensor, bits: int, run: int) -> Tensor:
    """Numbers of few ``bits`` in bytes, [N, blocks, k] -> [N, blocks, k * 8 / bits]: of each ``run`` bytes first all
    lowest bits, then all next ones, and so on."""
    runs: Tensor = packed.unflatten(2, (-1, run))
    return torch.stack([runs >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], dim=3).flatten(2)


def _read_q4_0(blocks: Tensor) -> _Read:
    return _planes(blocks[:, :, 2:], 4, 16), _half(blocks, 0), None


def _read_q4_1(blocks: Tensor) -> _Read:
    return _planes(blocks[:, :, 4:], 4, 16), _half(blocks, 0), _half(blocks, 2)


def _read_q5_0(blocks: Tensor) -> _Read:
    return _planes(blocks[:, :, 6:], 4, 16) | _planes(blocks[:, :, 2:6], 1, 1) << 4, _half(blocks, 0), None


def _read_q5_1(blocks: Tensor) -> _Read:
    codes = _planes(blocks[:, :, 8:], 4, 16) | _planes(blocks[:, :, 4:8], 1, 1) << 4
    return codes, _half(blocks, 0), _half(blocks, 2)


def _read_q8_0(blocks: Tensor) -> _Read:
    return blocks[:, :, 2:] ^ 128, _half(blocks, 0), None


def _read_q2_k(blocks: Tensor) -> _Read:
    """256 values: sixteen halves of groups with scales and minima of 4 bits."""
    both = blocks[:, :, :16]
    return _planes(blocks[:, :, 16:80], 2, 32), _by_halves(blocks, 80, both & 15), -_by_halves(blocks, 82, both >> 4)


def _read_q3_k(blocks: Tensor) -> _Read:
    """Read blocks of 256 values: 16 half groups with a 6-bit scale each."""
    six = _planes(blocks[:, :, 96:104], 4, 8) | _planes(blocks[:, :, 104:108], 2, 4) << 4
    codes = _planes(blocks[:, :, 32:96], 2, 32) | _planes(blocks[:, :, :32], 1, 32) << 2
    return codes + 4, _by_halves(blocks, 108, six.float() - 32), None


def _by_halves(blocks: Tensor, at: int, factors: Tensor) -> Tensor:
    """float32 [N, groups, 2]: sixteen scales of each block times its own, float16 at byte ``at``."""
    scales = (_half(blocks, at).float()[:, :, None] * factors).flatten(1)
    return scales.view(len(scales), -1, 2)


def _six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of Q4_K and Q5_K: eight of 6 bits each, times the block's own; float32 [N, groups]."""
    six = blocks[:, :, 4:16]
    low, high, rest = six[:, :, :4], six[:, :, 4:8], six[:, :, 8:]
    scales = torch.cat([low & 63, (rest & 15) | (low >> 6 << 4)], dim=2)
    minima = torch.cat([high & 63, (rest >> 4) | (high >> 6 << 4)], dim=2)
    scale = _half(blocks, 0).float()[:, :, None] * scales.float()
    minimum = -_half(blocks, 2).float()[:, :, None] * minima.float()
    return scale.flatten(1), minimum.flatten(1)


def _read_q4_k(blocks: Tensor) -> _Read:
    return _planes(blocks[:, :, 16:], 4, 32), *_six_bits(blocks)


def _read_q5_k(blocks: Tensor) -> _Read:
    codes = _planes(blocks[:, :, 48:], 4, 32) | _planes(blocks[:, :, 16:48], 1, 32) << 4
    return codes, *_six_bits(blocks)


def _read_q6_k(blocks: Tensor) -> _Read:
    """256 values: sixteen halves of groups with 8-bit scales."""
    codes = _planes(blocks[:, :, :128], 4, 64) | _planes(blocks[:, :, 128:192], 2, 32) << 4
    return codes, _by_halves(blocks, 208, blocks[:, :, 192:208].contiguous().view(torch.int8).float()), None


def _read_iq4_nl(blocks: Tensor) -> _Read:
    return _planes(blocks[:, :, 2:], 4, 16), _half(blocks, 0), None


def _read_mxfp4(blocks: Tensor) -> _Read:
    exponents = blocks[:, :, 0].int() - 127
    return _planes(blocks[:, :, 1:], 4, 16), torch.ldexp(torch.full(exponents.shape, 0.5), exponents), None


def _read_iq4_xs(blocks: Tensor) -> _Read:
    six = _planes(blocks[:, :, 4:8], 4, 1) | _planes(blocks[:, :, 2:4], 2, 1) << 4
    scales = _half(blocks, 0).float()[:, :, None] * (six.float() - 32)
    return _planes(blocks[:, :, 8:], 4, 16), scales.flatten(1), None


# Types whose codes are places in a book of vectors of 8 or 4 numbers. A book has at most 16 numbers, counting signs:
# each becomes a place in a table. A byte of signs is those of eight numbers, from its lowest bit on.


@cache
def _code_book(qtype: str) -> Tensor:
    """The vectors of a type: places in a table, uint8 [vectors, numbers of one], 0 for the book's least number."""
    from gguf import quants  # has the books, which are long; imported for these types alone

    form = getattr(quants, qtype)
    form.init_grid()
    book: np.ndarray = form.grid[0, 0]
    return torch.from_numpy(np.unique(book, return_inverse=True)[1].reshape(book.shape).astype(np.uint8))


def _vectors(qtype: str, places: Tensor) -> Tensor:
    """Vectors of a book, [N, blocks, k] -> uint8 [N, blocks, numbers]."""
    book = _code_book(qtype)
    as_one: Tensor = book.view(torch.int64 if book.shape[1] == 8 else torch.int32).flatten()
    return as_one[places.long()].view(torch.uint8)


def _signs(packed: Tensor) -> Tensor:
    """uint8 [N, blocks, k], bits of signs -> [N, blocks, 8 * k], 8 for a minus."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return (bits << 3).to(torch.uint8).view(torch.int64).flatten()[packed.long()].view(torch.uint8)


def _even_signs(seven: Tensor) -> Tensor:
    """Bytes of an even number of signs, of which seven bits are stored: int [...] -> uint8."""
    folded = seven ^ seven >> 4
    folded = folded ^ folded >> 2
    return (seven | (folded ^ folded >> 1) << 7).to(torch.uint8)


def _words(blocks: Tensor, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """Bytes ``begin`` to ``end`` of each block as signed integers; a copy, which is aligned."""
    return blocks[:, :, begin:end].clone(memory_format=torch.contiguous_format).view(dtype)


def _by_groups(blocks: Tensor, at: int, factors: Tensor) -> Tensor:
    """float32 [N, groups]: eight scales of each block times its own, float16 at byte ``at``."""
    return (_half(blocks, at).float()[:, :, None] * factors).flatten(1)


def _signs_and_scales(words: Tensor) -> tuple[Tensor, Tensor]:
    """int32 [N, blocks, 8], four times seven bits of signs, and scales of 4 bits -> as `_signs`, and [N, blocks, 8]."""
    sevens = words[..., None] >> torch.arange(0, 28, 7, dtype=torch.int32) & 127
    return _signs(_even_signs(sevens.flatten(2))), (words >> 28 & 15).float()


def _read_iq2_xxs(blocks: Tensor) -> _Read:
    words = _words(blocks, 2, 66, torch.int32).unflatten(2, (8, 2))
    signs, scales = _signs_and_scales(words[..., 1])
    codes = _vectors("IQ2_XXS", words[..., :1].contiguous().view(torch.uint8).flatten(2)) | signs
    return codes, _by_groups(blocks, 0, (scales + 0.5) * 0.25), None


def _read_iq2_xs(blocks: Tensor) -> _Read:
    words = _words(blocks, 2, 66, torch.int16).int() & 0xFFFF
    codes = _vectors("IQ2_XS", words & 511) | _signs(_even_signs(words >> 9))
    return codes, _by_halves(blocks, 0, (_planes(blocks[:, :, 66:74], 4, 1) + 0.5) * 0.25), None


def _read_iq2_s(blocks: Tensor) -> _Read:
    places = blocks[:, :, 2:34].int() | _planes(blocks[:, :, 66:74], 2, 1).int() << 8
    codes = _vectors("IQ2_S", places) | _signs(blocks[:, :, 34:66])
    return codes, _by_halves(blocks, 0, (_planes(blocks[:, :, 74:82], 4, 1) + 0.5) * 0.25), None


def _read_iq3_xxs(blocks: Tensor) -> _Read:
    signs, scales = _signs_and_scales(_words(blocks, 66, 98, torch.int32))
    return _vectors("IQ3_XXS", blocks[:, :, 2:66]) | signs, _by_groups(blocks, 0, (scales + 0.5) * 0.5), None


def _read_iq3_s(blocks: Tensor) -> _Read:
    places = blocks[:, :, 2:66].int() | _planes(blocks[:, :, 66:74], 1, 1).int() << 8
    codes = _vectors("IQ3_S", places) | _signs(blocks[:, :, 74:106])
    return codes, _by_groups(blocks, 0, _planes(blocks[:, :, 106:110], 4, 1).float() * 2.0 + 1.0), None


def _read_iq1_s(blocks: Tensor) -> _Read:
    """Numbers -1, 0 and 1, codes 0, 1 and 2; a group's have an eighth added or taken away, before they are scaled."""
    high = _words(blocks, 34, 50, torch.int16).int() & 0xFFFF
    places = blocks[:, :, 2:34].int() | (high[..., None] >> torch.arange(0, 12, 3) & 7).int().flatten(2) << 8
    scales = _by_groups(blocks, 0, (high >> 12 & 7) * 2.0 + 1.0)
    return _vectors("IQ1_S", places), scales, scales * (-0.875 - 0.25 * (high >> 15).flatten(1))


def _read_iq1_m(blocks: Tensor) -> _Read:
    """Read IQ1_M: like IQ1_S, but an eighth more or less for each 8 numbers, so that there are six of them; four words
    of scales have 4 bits of the block's each."""
    high = _planes(blocks[:, :, 32:48], 4, 1).int()
    places = blocks[:, :, :32].int() | (high & 7) << 8
    codes = _vectors("IQ1_M", places) | (high >> 3 << 2).to(torch.uint8).repeat_interleave(8, dim=2)
    words = _words(blocks, 48, 56, torch.int16).int() & 0xFFFF
    own = ((words >> 12) << torch.arange(0, 16, 4, dtype=torch.int32)).sum(dim=2).to(torch.int16).view(torch.float16)
    factors = ((words[..., None] >> torch.arange(0, 12, 3, dtype=torch.int32) & 7) * 2.0 + 1.0).flatten(2) * 0.125
    return codes, (own.float()[:, :, None] * factors).flatten(1).unflatten(1, (-1, 2)), None


def _ternary(codes: Tensor, blocks: Tensor, at: int) -> _Read:
    """Numbers -1, 0 and 1, codes 0, 1 and 2, with one scale a block, float16 at byte ``at``."""
    scales = _half(blocks, at).float().repeat_interleave(8, dim=1)
    return codes, scales, -scales


def _read_tq1_0(blocks: Tensor) -> _Read:
    """Five codes a byte, four in the last ones: the first of them are the highest digits in base 3 of its 256ths."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)[:, None]
    runs = [part[:, :, None] * powers for part in (blocks[:, :, :32], blocks[:, :, 32:48])]
    runs.append(blocks[:, :, None, 48:52] * powers[:4])
    codes = torch.cat([run.flatten(2) for run in runs], dim=2).int() * 3 >> 8
    return _ternary(codes.to(torch.uint8), blocks, 52)


def _read_tq2_0(blocks: Tensor) -> _Read:
    return _ternary(_planes(blocks[:, :, :64], 2, 32), blocks, 64)


class GGUFFormat(NamedTuple):
    """The reader of a GGUF type, and the kind it is packed to."""

    read: Callable[[Tensor], _Read]
    block_width: int  # values in a block
    block_bytes: int
    kind: Kind
    table: tuple[int, ...] | None = None


def _with_signs(*numbers: int) -> tuple[int, ...]:
    """A table of up to eight numbers and, from place 8 on, their negatives."""
    half = (*numbers, *[0] * (8 - len(numbers)))
    return *half, *(-number for number in half)


FORMATS = {
    "Q4_0": GGUFFormat(_read_q4_0, 32, 18, Kind(4)),
    "Q4_1": GGUFFormat(_read_q4_1, 32, 20, Kind(4, affine=True)),
    "Q5_0": GGUFFormat(_read_q5_0, 32, 22, Kind(5)),
    "Q5_1": GGUFFormat(_read_q5_1, 32, 24, Kind(5, affine=True)),
    "Q8_0": GGUFFormat(_read_q8_0, 32, 34, Kind(8)),
    "Q2_K": GGUFFormat(_read_q2_k, 256, 84, Kind(2, affine=True, halves=True)),
    "Q3_K": GGUFFormat(_read_q3_k, 256, 110, Kind(4, halves=True)),
    "Q4_K": GGUFFormat(_read_q4_k, 256, 144, Kind(4, affine=True)),
    "Q5_K": GGUFFormat(_read_q5_k, 256, 176, Kind(5, affine=True)),
    "Q6_K": GGUFFormat(_read_q6_k, 256, 210, Kind(6, halves=True)),
    "IQ4_NL": GGUFFormat(_read_iq4_nl, 32, 18, Kind(4, table=True), _IQ4),
    "IQ4_XS": GGUFFormat(_read_iq4_xs, 256, 136, Kind(4, table=True), _IQ4),
    "MXFP4": GGUFFormat(_read_mxfp4, 32, 17, Kind(4, table=True), _E2M1),
    "IQ3_S": GGUFFormat(_read_iq3_s, 256, 110, Kind(4, table=True), _with_signs(1, 3, 5, 7, 9, 11, 13, 15)),
    "IQ3_XXS": GGUFFormat(_read_iq3_xxs, 256, 98, Kind(4, table=True), _with_signs(4, 12, 20, 28, 36, 44, 52, 62)),
    "IQ2_S": GGUFFormat(_read_iq2_s, 256, 82, Kind(4, halves=True, table=True), _with_signs(8, 25, 43)),
    "IQ2_XS": GGUFFormat(_read_iq2_xs, 256, 74, Kind(4, halves=True, table=True), _with_signs(8, 25, 43)),
    "IQ2_XXS": GGUFFormat(_read_iq2_xxs, 256, 66, Kind(4, table=True), _with_signs(8, 25, 43)),
    "IQ1_M": GGUFFormat(_read_iq1_m, 256, 56, Kind(4, halves=True, table=True), _IQ1),
    "IQ1_S": GGUFFormat(_read_iq1_s, 256, 50, Kind(2, affine=True)),
    "TQ2_0": GGUFFormat(_read_tq2_0, 256, 66, Kind(2, affine=True)),
    "TQ1_0": GGUFFormat(_read_tq1_0, 256, 54, Kind(2, affine=True)),
}
GGUF_TYPES = tuple(FORMATS)
