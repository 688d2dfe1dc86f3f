"""Packing of GGUF tensors with the file's own codes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo_kernels import cpu
from octavo_kernels.packing.groups import pack_codes
from octavo_kernels.quant import BLOCK, GROUP, Kind, PackedLinear, PackedPart, part_nbytes


def packed_kind(qtype: str | None = None) -> Kind:
    """What a weight is packed to: by `pack_gguf` if it takes ``qtype``, else by `pack_w8`."""
    form = FORMATS.get(qtype or "")
    return form.kind if form else Kind(8)


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
    table = None if not form.kind.table else _E2M1 if qtype == "MXFP4" else _IQ4
    return pack_codes(codes, scales, minima, bits=form.kind.bits, table=table, activation_terms=activation_terms)


# Readers of GGUF blocks: uint8 [N, blocks, bytes] -> codes [N, blocks, values of a block], scales [N, groups] or
# [N, groups, 2] and minima [N, groups]. The formats are those of ggml (https://github.com/ggml-org/ggml,
# ggml-common.h). Codes of symmetric types are such that the middle of their range is 0.

_Read = tuple[Tensor, Tensor, Tensor | None]
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # times two
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


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


def _read_q3_k(blocks: Tensor) -> _Read:
    """256 values: sixteen halves of groups with 6-bit scales."""
    six = _planes(blocks[:, :, 96:104], 4, 8) | _planes(blocks[:, :, 104:108], 2, 4) << 4
    codes = _planes(blocks[:, :, 32:96], 2, 32) | _planes(blocks[:, :, :32], 1, 32) << 2
    return codes + 4, _by_halves(blocks, 108, six.float() - 32), None


def _by_halves(blocks: Tensor, at: int, factors: Tensor) -> Tensor:
    """float32 [N, groups, 2]: sixteen scales of each block times its own, float16 at byte ``at``."""
    scales = (_half(blocks, at).float()[:, :, None] * factors).flatten(1)
    return scales.view(len(scales), -1, 2)


def _six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K: eight scales and minima of 6 bits, each times the block's own; float32 [N, groups]."""
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


class GGUFFormat(NamedTuple):
    """How a GGUF type is read, and what it is packed to."""

    read: Callable[[Tensor], _Read]
    block_width: int  # values in a block
    block_bytes: int
    kind: Kind


FORMATS = {
    "Q4_0": GGUFFormat(_read_q4_0, 32, 18, Kind(4)),
    "Q4_1": GGUFFormat(_read_q4_1, 32, 20, Kind(4, affine=True)),
    "Q5_0": GGUFFormat(_read_q5_0, 32, 22, Kind(5)),
    "Q5_1": GGUFFormat(_read_q5_1, 32, 24, Kind(5, affine=True)),
    "Q8_0": GGUFFormat(_read_q8_0, 32, 34, Kind(8)),
    "Q3_K": GGUFFormat(_read_q3_k, 256, 110, Kind(4, halves=True)),
    "Q4_K": GGUFFormat(_read_q4_k, 256, 144, Kind(4, affine=True)),
    "Q5_K": GGUFFormat(_read_q5_k, 256, 176, Kind(5, affine=True)),
    "Q6_K": GGUFFormat(_read_q6_k, 256, 210, Kind(6, halves=True)),
    "IQ4_NL": GGUFFormat(_read_iq4_nl, 32, 18, Kind(4, table=True)),
    "IQ4_XS": GGUFFormat(_read_iq4_xs, 256, 136, Kind(4, table=True)),
    "MXFP4": GGUFFormat(_read_mxfp4, 32, 17, Kind(4, table=True)),
}
GGUF_TYPES = tuple(FORMATS)
