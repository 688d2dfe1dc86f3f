"""Quantised linears on CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo_kernels import reference
from octavo_kernels.cpu.library import DTYPES, Library, as_contiguous, get_library, norm_dtype, threads_for
from octavo_kernels.quant import BLOCK, GROUP, Kind, PackedLinear, QuantizedRows, empty_rows, num_groups

_PLAIN, _NORM, _SILU = 0, 1, 2  # csrc/linear_ops.h: quantize_args.kind
# GGUF type that `pack_gguf` reads: pack_gguf_args.type in csrc/linear_ops.h.
PACKED_TYPES = {
    name: number
    for number, name in enumerate(
        ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
    )
}


def pack_gguf(raw: np.ndarray, qtype: str, width: int, kind: Kind, out: Tensor) -> bool:
    """Fill ``out``, the bytes of a `PackedPart` of as many channels as ``raw`` has rows, on this thread alone; False
    without a library, and for types that it does not read."""
    library = get_library()
    if library is None or qtype not in PACKED_TYPES:
        return False
    raw = np.ascontiguousarray(raw)
    op = library.pack(
        "pack_gguf",
        raw.ctypes.data,
        out.data_ptr(),
        len(raw),
        width // GROUP,
        PACKED_TYPES[qtype],
        kind.bits,
        kind.flags,
    )
    library.run(op, threads=1)
    return True


def quantize_rows(x: Tensor, terms: int = 1) -> QuantizedRows:
    """See `octavo_kernels.quantize_rows`."""
    library = get_library()
    if library is None or x.dtype not in DTYPES:
        return reference.quantize_rows(x, terms)
    rows, op, _keep = _quantize(library, _PLAIN, x, x.shape[-1], terms)
    library.run(op, threads_for(x.numel()))
    return rows


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, terms: int = 1, plain: Tensor | None = None
) -> tuple[QuantizedRows, Tensor]:
    """See `octavo_kernels.rms_norm_quantize`."""
    library = get_library()
    if library is None or x.dtype not in DTYPES or norm_dtype(weight, x.dtype) is None:
        return reference.rms_norm_quantize(x, weight, eps, residual, terms, plain)
    x = as_contiguous(x)
    total = x if residual is None else torch.empty_like(x)
    rows, op, _keep = _quantize(library, _NORM, x, x.shape[-1], terms, residual, weight, total, eps, plain)
    library.run(op, threads_for(x.numel()))
    return rows, total


def silu_and_mul_quantize(x: Tensor, terms: int = 1, plain: Tensor | None = None) -> QuantizedRows:
    """See `octavo_kernels.silu_and_mul_quantize`."""
    library = get_library()
    if library is None or x.dtype not in DTYPES:
        return reference.silu_and_mul_quantize(x, terms, plain)
    rows, op, _keep = _quantize(library, _SILU, x, x.shape[-1] // 2, terms, plain=plain)
    library.run(op, threads_for(x.numel()))
    return rows


def quantized_linear(x: Tensor | QuantizedRows, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
    """See `octavo_kernels.quantized_linear`."""
    library = get_library()
    if library is None or x.dtype not in DTYPES:
        return reference.quantized_linear(x, packed, bias)
    if packed.margin:
        return _head(library, x, packed, bias, None)[0]
    rows, program, _keep = _rows(library, x, packed)
    count = rows.pairs.shape[0]
    out = torch.empty((count, packed.channels), dtype=rows.dtype)
    if bias is not None:
        bias = as_contiguous(bias, torch.float32)
    offset = 0
    for part in packed.parts:
        program += library.pack(
            "quantized_linear",
            rows.pairs.data_ptr(),
            rows.meta.data_ptr(),
            part.data.data_ptr(),
            0 if bias is None else bias.data_ptr() + 4 * offset,
            out.data_ptr(),
            count,
            part.channels,
            packed.groups,
            packed.activation_terms,
            part.kind.bits,
            part.kind.flags,
            packed.channels,
            offset,
            DTYPES[rows.dtype],
        )
        offset += part.channels
    library.run(program)
    return out


def quantized_head(
    x: Tensor, packed: PackedLinear, wants_logits: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Logits float32 [T, N] of ``x`` float32 or bfloat16 [T, K], their `argmax`, and the largest of each `BLOCK` of
    them float32 [T, ceil(N / BLOCK)] (undefined in a row with a NaN); None without a kernel for that.

    ``packed`` has a margin. The logits are undefined where ``wants_logits`` int64 [1] is 0 when the operation runs:
    writing them takes a fifth of its time.
    """
    library = get_library()
    if library is None or x.dtype not in DTYPES:
        return None
    return _head(library, x, packed, None, wants_logits)


def _head(
    library: Library, x: Tensor | QuantizedRows, packed: PackedLinear, bias: Tensor | None, wants_logits: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, program, _keep = _rows(library, x, packed)
    (part,), count = packed.parts, len(rows.pairs)
    out = torch.empty((count, part.channels))
    index, best = torch.empty(count, dtype=torch.int64), torch.empty(count)
    maxima = torch.empty(count, -(-part.channels // BLOCK))
    if bias is not None:
        bias = as_contiguous(bias, torch.float32)
    program += library.pack(
        "quantized_head",
        rows.pairs.data_ptr(),
        rows.meta.data_ptr(),
        part.data.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        0 if wants_logits is None else wants_logits.data_ptr(),
        index.data_ptr(),
        best.data_ptr(),
        maxima.data_ptr(),
        count,
        part.channels,
        packed.groups,
        part.kind.bits,
        part.kind.flags,
        packed.margin,
    )
    library.run(program)
    return out, index, best, maxima


def _rows(library: Library, x: Tensor | QuantizedRows, packed: PackedLinear) -> tuple[QuantizedRows, bytes, object]:
    """``x`` quantised, the packed operations that do it, if any, and the objects that must live until they have run."""
    program, keep = b"", list[object]()
    if isinstance(x, QuantizedRows):
        rows = x
    else:
        rows, program, *keep = _quantize(library, _PLAIN, x, x.shape[-1], packed.activation_terms)
    _check(rows, packed)
    return rows, program, keep


def gated_linear_quantize(x: QuantizedRows, packed: PackedLinear, terms: int = 1) -> QuantizedRows:
    """See `octavo_kernels.gated_linear_quantize`."""
    library, inner = get_library(), packed.channels // 2
    if library is None or x.dtype not in DTYPES or len(packed.parts) != 1 or inner % GROUP:
        return silu_and_mul_quantize(quantized_linear(x, packed), terms)
    _check(x, packed)
    part, count = packed.parts[0], x.pairs.shape[0]
    rows = empty_rows(count, terms, inner, x.dtype)
    op = library.pack(
        "gated_linear",
        x.pairs.data_ptr(),
        x.meta.data_ptr(),
        part.data.data_ptr(),
        rows.pairs.data_ptr(),
        rows.meta.data_ptr(),
        count,
        inner,
        packed.groups,
        packed.activation_terms,
        part.kind.bits,
        part.kind.flags,
        terms,
        DTYPES[x.dtype],
    )
    library.run(op)
    return rows


def quantized_embedding(ids: Tensor, packed: PackedLinear, dtype: torch.dtype, first: int | None = None) -> Tensor:
    """See `octavo_kernels.quantized_embedding`."""
    library = get_library()
    if library is None or dtype not in DTYPES or len(packed.parts) != 1:
        return reference.quantized_embedding(ids, packed, dtype, first)
    ids, part = as_contiguous(ids, torch.int64), packed.parts[0]
    out = torch.empty((ids.numel(), packed.width), dtype=dtype)
    op = library.pack(
        "quantized_embedding",
        ids.data_ptr(),
        part.data.data_ptr(),
        out.data_ptr(),
        ids.numel(),
        part.channels,
        packed.width,
        packed.groups,
        part.kind.bits,
        part.kind.flags,
        DTYPES[dtype],
        -1 if first is None else first,
    )
    library.run(op, threads_for(out.numel()))
    return out.view(*ids.shape, packed.width)


def _check(rows: QuantizedRows, packed: PackedLinear) -> None:
    if rows.width != packed.width or rows.terms != packed.activation_terms:
        raise ValueError(
            f"x: rows of {rows.width} values in {rows.terms} terms do not fit a weight of width {packed.width} "
            f"that takes {packed.activation_terms}"
        )


def _quantize(
    library: Library,
    kind: int,
    x: Tensor,
    width: int,
    terms: int,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    total: Tensor | None = None,
    eps: float = 0.0,
    plain: Tensor | None = None,
) -> tuple[QuantizedRows, bytes, tuple[Tensor | None, ...]]:
    """The rows to be filled, the packed operation, and the tensors that must live until it has run."""
    x = as_contiguous(x)
    residual = None if residual is None else as_contiguous(residual, x.dtype)
    weight = None if weight is None else as_contiguous(weight)
    count, groups = x.numel() // x.shape[-1], num_groups(width)
    rows = empty_rows(count, terms, width, x.dtype)
    op = library.pack(
        "quantize",
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        0 if total is None or residual is None else total.data_ptr(),
        0 if plain is None else plain.data_ptr(),
        rows.pairs.data_ptr(),
        rows.meta.data_ptr(),
        kind,
        count,
        width,
        groups,
        terms,
        DTYPES[x.dtype],
        DTYPES[x.dtype if weight is None else weight.dtype],
        eps,
    )
    return rows, op, (x, residual, weight, total)
