"""Quantised activations and products with packed weights, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.quant import BLOCK, GROUP, PackedLinear, QuantizedRows, dequantize, unpack_part
from octavo_kernels.reference.layers import fused_add_rms_norm, rms_norm, silu_and_mul


def quantize_rows(x: Tensor, terms: int = 1, *, rest_where_large: bool = False) -> QuantizedRows:
    """``rest_where_large``: second terms only in groups with a value of a third of the row's largest and more."""
    width = x.shape[-1]
    wide = torch.nn.functional.pad(x.float(), (0, -width % GROUP)).unflatten(-1, (-1, GROUP))
    highest = wide.abs().amax(dim=-1)
    inverse = torch.where(highest > 0, torch.full_like(highest, 127.0) / highest, torch.zeros_like(highest))
    usable = inverse.isfinite() & wide.isfinite().all(dim=-1)
    inverse = torch.where(usable, inverse, torch.zeros_like(inverse))
    scaled = torch.where(usable[..., None], wide, torch.zeros_like(wide)) * inverse[..., None]
    values = scaled.round()
    scale = torch.where(wide.isfinite().all(dim=-1), highest / 127.0, torch.full_like(highest, float("nan")))
    stored, sums, has_rest = [values], values, torch.full_like(highest, terms == 2, dtype=torch.bool)
    if terms == 2:
        rest = ((scaled - values) * 256.0).round().clamp(-127, 127)
        if rest_where_large:
            has_rest = 3.0 * highest >= highest.amax(dim=-1, keepdim=True)
            rest = torch.where(has_rest[..., None], rest, torch.zeros_like(rest))
        stored, sums, scale = [values, rest], values * 256.0 + rest, scale * (1.0 / 256.0)
    total = sums.sum(dim=-1)
    integers = [value.to(torch.int32).view(torch.float32) for value in (total, has_rest)]
    meta = torch.stack([scale, integers[0], scale * total, integers[1]], dim=-1)
    return QuantizedRows(torch.stack([v.flatten(-2) for v in stored], dim=1).to(torch.int8), meta, width, x.dtype)


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, terms: int = 1
) -> tuple[QuantizedRows, Tensor]:
    if residual is None:
        return quantize_rows(rms_norm(x, weight, eps), terms, rest_where_large=True), x
    normed, total = fused_add_rms_norm(x, residual, weight, eps)
    return quantize_rows(normed, terms, rest_where_large=True), total


def silu_and_mul_quantize(x: Tensor, terms: int = 1) -> QuantizedRows:
    return quantize_rows(silu_and_mul(x), terms)


def quantized_linear(x: Tensor | QuantizedRows, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
    rows = x if isinstance(x, QuantizedRows) else quantize_rows(x, packed.terms)
    values = rows.values.float().unflatten(-1, (-1, GROUP))
    scale = rows.meta[..., 0]
    if rows.terms == 1:
        result = _product(values[:, 0], scale, packed)
    else:
        result = _product(values[:, 0] * 256.0 + values[:, 1], scale, packed)
    if bias is not None:
        result = result + bias.float()
    if packed.margin and rows.dtype == torch.float32:
        first = _product(values[:, 0], scale * 256.0, packed)
        first = first if bias is None else first + bias.float()
        pad = torch.nn.functional.pad(first, (0, -packed.channels % BLOCK), value=float("-inf"))
        highest = pad.unflatten(1, (-1, BLOCK)).amax(dim=2)
        near = highest >= highest.amax(dim=1, keepdim=True) - packed.margin
        result = torch.where(near.repeat_interleave(BLOCK, dim=1)[:, : packed.channels], result, first)
    return result.to(rows.dtype)


def gated_linear_quantize(x: QuantizedRows, packed: PackedLinear, terms: int = 1) -> QuantizedRows:
    return silu_and_mul_quantize(quantized_linear(x, packed), terms)


def _product(values: Tensor, scale: Tensor, packed: PackedLinear) -> Tensor:
    """float32 [T, channels]: integers ``values`` [T, G, 32] that stand for ``scale`` [T, G] each, times the weight."""
    scale_sum = scale * values.sum(dim=-1)
    out = []
    for part in packed.parts:
        codes, scales, minima = unpack_part(part, packed.groups)
        total = torch.zeros(len(values), part.channels)
        for g in range(packed.groups):
            # Sums of 32 products are below 2^24 (one term), so exact in float32; float64 holds those of two terms.
            exact = values[:, g].double() @ codes[:, g].double().T
            total += exact.float() * (scale[:, g, None] * scales[:, g])
            if minima is not None:
                total += scale_sum[:, g, None] * minima[:, g]
        out.append(total)
    return torch.cat(out, dim=1)


def quantized_embedding(ids: Tensor, packed: PackedLinear, dtype: torch.dtype) -> Tensor:
    return dequantize(packed)[ids].to(dtype)
