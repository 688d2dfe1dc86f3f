"""Packing of GGUF tensors with the file's own codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo_kernels import cpu
from octavo_kernels.packing.groups import pack_codes
from octavo_kernels.quant import GROUP, PackedLinear, PackedPart, part_nbytes


def packed_nbytes(channels: int, width: int, qtype: str | None = None) -> int:
    """Bytes of a packed weight ``[channels, width]``: of `pack_gguf` if it takes ``qtype``, else of `pack_w8`."""
    form = FORMATS.get(qtype or "")
    return part_nbytes(channels, width, form.bits, form.affine) if form else part_nbytes(channels, width, 8, False)


def pack_gguf(raw: np.ndarray, qtype: str, shape: Sequence[int], activation_terms: int = 1) -> PackedLinear:
    """Pack rows of a GGUF tensor, in the bytes of the file: ``raw`` uint8 [N, row bytes], ``shape`` (N, K).

    The codes are the file's own, and so are scales of 8-bit types. Scales and minima of 4-bit types become 16-bit
    integers relative to their channel's largest (cpu/csrc/quant.h); those of Q4_K are rounded to float16 before. Raises
    ValueError for a type that is not in `GGUF_TYPES` (dequantise it and use `pack_w8`) and for bytes that do not fit.
    """
    channels, width = shape
    if qtype not in FORMATS:
        raise ValueError(f"qtype: {qtype!r} cannot be packed; known: {', '.join(GGUF_TYPES)}")
    read, block_width, block_bytes, bits, affine = FORMATS[qtype]
    if width % block_width or raw.shape != (channels, width // block_width * block_bytes):
        raise ValueError(f"raw: {tuple(raw.shape)} bytes are not a {qtype} tensor of shape ({channels}, {width})")
    data = cpu.pack_gguf(raw, qtype, channels, width // GROUP)
    if data is not None:
        return PackedLinear((PackedPart(data, channels, bits, affine),), channels, width, activation_terms)
    blocks = torch.from_numpy(np.array(raw)).view(channels, -1, block_bytes)
    codes, scales, minima = read(blocks)
    return pack_codes(codes.reshape(channels, -1, GROUP), scales, minima, bits=bits, activation_terms=activation_terms)


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
    minimum = -_half(blocks, 2).float()[:, :, None] * minima.float()
    return codes, scale.flatten(1).to(torch.float16), minimum.flatten(1).to(torch.float16)


class GGUFFormat(NamedTuple):
    """How a GGUF type is read, and what it is packed to."""

    read: Callable[[Tensor], _Read]
    block_width: int  # values in a block
    block_bytes: int
    bits: int  # of the packed codes
    affine: bool = False  # has minima


FORMATS = {
    "Q4_0": GGUFFormat(_read_q4_0, 32, 18, 4),
    "Q4_1": GGUFFormat(_read_q4_1, 32, 20, 4, affine=True),
    "Q4_K": GGUFFormat(_read_q4_k, 256, 144, 4, affine=True),
    "Q5_0": GGUFFormat(_read_q5_0, 32, 22, 8),
    "Q8_0": GGUFFormat(_read_q8_0, 32, 34, 8),
}
GGUF_TYPES = tuple(FORMATS)
