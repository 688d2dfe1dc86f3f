"""GGUF's tensor types turned into floats by whole-tensor operations.

Each ``_q...`` function takes blocks (uint8 [n, bytes a block]) and fills float32 [n, values a block], equal bit for bit
to `gguf.quants`. The layouts are ggml's (ggml-common.h, ggml-quants.c). Types that are rare in the wild go
through `gguf.quants` itself, imported when the first of them is met.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from octavo.errors import ModelError
from octavo.gguf.header import TENSOR_TYPES

_LAYOUT = {name: (block, nbytes) for name, block, nbytes in TENSOR_TYPES.values()}
_PLAIN = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
_CHUNK = 1 << 20  # values dequantised at a time: large enough for whole-tensor operations, small beside any tensor

Dequantizer = Callable[[torch.Tensor, torch.Tensor], None]


def _half(blocks: torch.Tensor, at: int, count: int = 1) -> torch.Tensor:
    """``count`` float16 values of each block, from byte ``at``: float32 [n, count]."""
    return blocks[:, at : at + 2 * count].contiguous().view(torch.float16).float()


def _planes(packed: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """Small numbers packed into bytes: uint8 [n, k] to uint8 [n, k * 8 / bits].

    ggml packs by planes: of each ``run`` bytes first all lowest ``bits``, then all next ones, and so on.
    """
    runs = packed.contiguous().view(len(packed), -1, run)  # contiguous first: short strided rows are slow to compute on
    mask = (1 << bits) - 1
    planes = [runs & mask, *((runs >> shift) & mask for shift in range(bits, 8 - bits, bits)), runs >> (8 - bits)]
    return torch.stack(planes, dim=2).view(len(packed), -1)


def _scale(out: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None = None) -> None:
    """Multiply float32 [n, k] by its group's scale [n, groups] and take its group's minimum away."""
    grouped = out.view(*scales.shape, -1).mul_(scales.unsqueeze(-1))
    if minima is not None:
        grouped.sub_(minima.unsqueeze(-1))


def _q4_0(b: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(_planes(b[:, 2:], 4, 16)).sub_(8).mul_(_half(b, 0))


def _q4_1(b: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(_planes(b[:, 4:], 4, 16)).mul_(_half(b, 0)).add_(_half(b, 2))


def _q5_0(b: torch.Tensor, out: torch.Tensor) -> None:
    q = _planes(b[:, 6:], 4, 16) | (_planes(b[:, 2:6], 1, 1) << 4)
    out.copy_(q).sub_(16).mul_(_half(b, 0))


def _q5_1(b: torch.Tensor, out: torch.Tensor) -> None:
    q = _planes(b[:, 8:], 4, 16) | (_planes(b[:, 4:8], 1, 1) << 4)
    out.copy_(q).mul_(_half(b, 0)).add_(_half(b, 2))


def _q8_0(b: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(b[:, 2:].view(torch.int8)).mul_(_half(b, 0))


def _q2_k(b: torch.Tensor, out: torch.Tensor) -> None:
    scales = b[:, :16]
    out.copy_(_planes(b[:, 16:80], 2, 32))
    _scale(out, (scales & 15).float() * _half(b, 80), (scales >> 4).float() * _half(b, 82))


def _q3_k(b: torch.Tensor, out: torch.Tensor) -> None:
    scales = _planes(b[:, 96:104], 4, 8) | (_planes(b[:, 104:108], 2, 4) << 4)
    out.copy_(_planes(b[:, 32:96], 2, 32) | (_planes(b[:, :32], 1, 32) << 2)).sub_(4)
    _scale(out, scales.float().sub_(32) * _half(b, 108))


def _scales_and_minima(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack the eight 6-bit scales and minima of Q4_K and Q5_K from 12 bytes, times the block's two factors."""
    low, mid, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=1)
    minima = torch.cat((mid & 63, (high >> 4) | ((mid >> 2) & 48)), dim=1)
    return scales.float() * _half(b, 0), minima.float() * _half(b, 2)


def _q4_k(b: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(_planes(b[:, 16:], 4, 32))
    _scale(out, *_scales_and_minima(b))


def _q5_k(b: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(_planes(b[:, 48:], 4, 32) | (_planes(b[:, 16:48], 1, 32) << 4))
    _scale(out, *_scales_and_minima(b))


def _q6_k(b: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(_planes(b[:, :128], 4, 64) | (_planes(b[:, 128:192], 2, 32) << 4)).sub_(32)
    _scale(out, b[:, 192:208].view(torch.int8).float() * _half(b, 208))


_IQ4 = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32)


def _iq4_nl(b: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(_IQ4[_planes(b[:, 2:], 4, 16).int()]).mul_(_half(b, 0))


def _iq4_xs(b: torch.Tensor, out: torch.Tensor) -> None:
    scales = _planes(b[:, 4:8], 4, 1) | (_planes(b[:, 2:4], 2, 1) << 4)
    out.copy_(_IQ4[_planes(b[:, 8:], 4, 16).int()])
    _scale(out, scales.float().sub_(32) * _half(b, 0))


_OWN: dict[str, Dequantizer] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}


def dequantize(raw: np.ndarray, qtype: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Bytes of a tensor (uint8 [rows, row_bytes], given away by the caller) as [rows, values a row] of ``dtype``.

    Without ``dtype``: the stored one for plain types, float32 for quantised ones. Raises ModelError.
    """
    if qtype in _PLAIN:
        plain = torch.from_numpy(raw).view(_PLAIN[qtype])
        return plain if dtype is None else plain.to(dtype)
    block, nbytes = _LAYOUT[qtype]
    out = torch.empty(raw.shape[0], raw.shape[1] // nbytes * block, dtype=dtype or torch.float32)
    dequantize_into(out, raw, qtype)
    return out


def dequantize_into(out: torch.Tensor, raw: np.ndarray, qtype: str) -> None:
    """Dequantize into a contiguous tensor [rows, values a row] of any float type on the CPU."""
    data = torch.from_numpy(raw)
    if qtype in _PLAIN:
        out.copy_(data.view(_PLAIN[qtype]))
        return
    block, nbytes = _LAYOUT[qtype]
    blocks, flat = data.view(-1, nbytes), out.view(-1, block)
    function = _OWN.get(qtype) or _by_library(qtype)
    step = max(1, _CHUNK // block)
    room = None if out.dtype == torch.float32 else torch.empty(min(step, len(flat)), block)
    for start in range(0, len(blocks), step):
        chunk, target = blocks[start : start + step], flat[start : start + step]
        if room is None:
            function(chunk, target)
        else:
            function(chunk, room[: len(chunk)])
            target.copy_(room[: len(chunk)])


def _by_library(qtype: str) -> Dequantizer:
    from gguf import GGMLQuantizationType, quants

    try:
        kind = GGMLQuantizationType[qtype]
        quants.dequantize(np.zeros((1, _LAYOUT[qtype][1]), np.uint8), kind)
    except (KeyError, NotImplementedError):
        raise ModelError(f"GGUF type {qtype} cannot be dequantised; use a file quantised to another type") from None

    def fill(blocks: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.from_numpy(quants.dequantize(blocks.numpy(), kind)))

    return fill
