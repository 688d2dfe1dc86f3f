"""GGUF's tensor types turned into floats by whole-tensor operations.

Each ``_q...`` function takes blocks (uint8 [n, bytes a block]) and returns float32 [n, values a block], equal bit for
bit to `gguf.quants`. The layouts are ggml's (ggml-common.h, ggml-quants.c). Types that are rare in the wild go
through `gguf.quants` itself, imported when the first of them is met.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from octavo.errors import ModelError
from octavo.loader.gguf_reader import TENSOR_TYPES

_LAYOUT = {name: (block, nbytes) for name, block, nbytes in TENSOR_TYPES.values()}
_PLAIN = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
_CHUNK = 1 << 18  # values dequantised at a time: the intermediate results stay in the processor's cache


def _half(blocks: torch.Tensor, at: int, count: int = 1) -> torch.Tensor:
    """``count`` float16 values of each block, from byte ``at``: float32 [n, count]."""
    return blocks[:, at : at + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(qs: torch.Tensor) -> torch.Tensor:
    """[n, k] bytes to [n, 2k] values of four bits: first all low halves, then all high ones."""
    return torch.cat((qs & 15, qs >> 4), dim=1)


def _q4_0(b: torch.Tensor) -> torch.Tensor:
    return _nibbles(b[:, 2:]).float().sub_(8).mul_(_half(b, 0))


def _q4_1(b: torch.Tensor) -> torch.Tensor:
    return _nibbles(b[:, 4:]).float().mul_(_half(b, 0)).add_(_half(b, 2))


def _q8_0(b: torch.Tensor) -> torch.Tensor:
    return b[:, 2:].view(torch.int8).float().mul_(_half(b, 0))


_OWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}


def dequantize(raw: np.ndarray, qtype: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Bytes of a tensor (uint8 [rows, row_bytes]) to a new tensor [rows, values a row] of ``dtype``.

    Without ``dtype``: the stored one for plain types, float32 for quantised ones.
    """
    if not raw.flags.writeable or not raw.flags.c_contiguous:
        raw = np.array(raw)  # torch wants memory of its own
    data = torch.from_numpy(raw)
    if qtype in _PLAIN:
        plain = data.view(_PLAIN[qtype])
        return plain if dtype is None else plain.to(dtype)
    block, nbytes = _LAYOUT[qtype]
    rows, row_bytes = raw.shape
    out = torch.empty(rows, row_bytes // nbytes * block, dtype=dtype or torch.float32)
    blocks, flat = data.view(-1, nbytes), out.view(-1, block)
    function = _OWN.get(qtype) or _by_library(qtype)
    step = max(1, _CHUNK // block)
    for start in range(0, len(blocks), step):
        flat[start : start + step] = function(blocks[start : start + step])
    return out


def _by_library(qtype: str) -> Callable[[torch.Tensor], torch.Tensor]:
    from gguf import GGMLQuantizationType, quants

    try:
        kind = GGMLQuantizationType[qtype]
        quants.dequantize(np.zeros((1, _LAYOUT[qtype][1]), np.uint8), kind)
    except (KeyError, NotImplementedError):
        raise ModelError(f"GGUF type {qtype} cannot be dequantised; use a file quantised to another type") from None
    return lambda blocks: torch.from_numpy(quants.dequantize(blocks.numpy(), kind))
