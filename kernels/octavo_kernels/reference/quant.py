"""Quantised activations and products with packed weights, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.quant import (
    BLOCK,
    BY_ROW,
    GROUP,
    OFFSET_BITS,
    RELATIVE_BITS,
    SCALE_BITS,
    SECOND_UNIT,
    PackedLinear,
    QuantizedRows,
    Unpacked,
    dequantize,
    num_groups,
    scaled_row_steps,
    unpack_part,
)
from octavo_kernels.reference.elementwise import embedding, fused_add_rms_norm, rms_norm, silu_and_mul


def quantize_rows(x: Tensor, terms: int = 1, *, second_term_where_large: bool = False) -> QuantizedRows:
    """See `octavo_kernels.quantize_rows`. ``second_term_where_large``: as in `octavo_kernels.rms_norm_quantize`."""
    if terms == BY_ROW:
        return _scale_rows(x)
    width = x.shape[-1]
    wide = torch.nn.functional.pad(x.float(), (0, -width % (2 * GROUP))).unflatten(-1, (-1, GROUP))
    highest = wide.abs().amax(dim=-1)
    inverse = torch.where(highest > 0, torch.full_like(highest, 127.0) / highest, torch.zeros_like(highest))
    usable = inverse.isfinite() & wide.isfinite().all(dim=-1)
    inverse = torch.where(usable, inverse, torch.zeros_like(inverse))
    scaled = torch.where(usable[..., None], wide, torch.zeros_like(wide)) * inverse[..., None]
    values = scaled.round()
    scale = torch.where(wide.isfinite().all(dim=-1), highest / 127.0, torch.full_like(highest, float("nan")))
    stored, has_second_term = [values], torch.full_like(highest, terms == 2, dtype=torch.bool)
    if terms == 2:
        rest = ((scaled - values) * 256.0).round().clamp(-127, 127)
        if second_term_where_large:
            has_second_term = 3.0 * highest >= highest.amax(dim=-1, keepdim=True)
            rest = torch.where(has_second_term[..., None], rest, torch.zeros_like(rest))
        stored.append(rest)
    unit = scale.amax(dim=-1, keepdim=True)  # NaN if one is
    inverse = torch.where((unit > 2.0**-100) & unit.isfinite(), 2.0**RELATIVE_BITS / unit, torch.zeros_like(unit))
    relative_scale = (scale * inverse).nan_to_num(0.0)
    pairs = torch.stack([_pairs(integers, relative_scale) for integers in stored], dim=1)
    second_sums = stored[-1].sum(dim=-1) if terms == 2 else torch.zeros_like(scale)
    first_halves = [integers[..., : GROUP // 2].sum(dim=-1) for integers in (stored[0], stored[-1])]
    integers = [
        field.to(torch.int32).view(torch.float32)
        for field in (values.sum(dim=-1), second_sums, *first_halves, has_second_term)
    ]
    meta = torch.nn.functional.pad(torch.cat([scale, *integers, unit], dim=-1), (0, 15))
    return QuantizedRows(pairs, meta, width, x.dtype)


_OUTLIER = 6.0  # cpu/csrc/quant.h


def _scale_rows(x: Tensor) -> QuantizedRows:
    """Rows with one scale (cpu/csrc/quant.h: scaled_row)."""
    width, groups = x.shape[-1], num_groups(x.shape[-1])
    wide = torch.nn.functional.pad(x.float(), (0, groups * GROUP - width))
    highest = wide.abs().amax(dim=-1)
    top = torch.minimum(highest, _OUTLIER / width * wide.abs().sum(dim=-1)).maximum(highest * (1.0 / SECOND_UNIT))
    finite, inverse = highest.isfinite(), 127.0 / top
    usable = inverse.isfinite() & finite
    scaled = torch.where(usable[:, None], wide, 0.0) * torch.where(usable, inverse, 0.0)[:, None]
    values = scaled.round()
    second = (values * (1.0 / SECOND_UNIT)).round()
    in_use = second.view(len(x), groups, 8, 4).any(dim=-1)
    steps = (in_use * (1 << torch.arange(8))).sum(dim=-1).to(torch.uint8)
    scale = torch.where(finite, top / 127.0, torch.nan)
    header = torch.stack([scale, values.sum(dim=-1).to(torch.int32).view(torch.float32)], dim=1)
    fields = [
        torch.nn.functional.pad(header.view(torch.uint8), (0, 56)),
        torch.nn.functional.pad(steps, (0, scaled_row_steps(groups) - groups)),
        (values - second * SECOND_UNIT).to(torch.int8).view(torch.uint8),
        second.to(torch.int8).view(torch.uint8),
    ]
    return QuantizedRows(torch.cat(fields, dim=1), torch.empty(0), width, x.dtype)


def unpack_scaled_rows(rows: QuantizedRows) -> tuple[Tensor, Tensor]:
    """The scales float32 [T] and the integers int32 [T, G * 32] of rows with one scale."""
    groups = num_groups(rows.width)
    values = rows.pairs[:, 64 + scaled_row_steps(groups) :].contiguous().view(torch.int8).int()
    scales: Tensor = rows.pairs[:, :4].contiguous().view(torch.float32).flatten()
    return scales, values[:, : groups * GROUP] + SECOND_UNIT * values[:, groups * GROUP :]


def _pairs(values: Tensor, relative_scale: Tensor) -> Tensor:
    """uint8 [T, G / 2, 80] (cpu/csrc/quant.h: row_pair) of integers [T, G, 32] and float32 [T, G]."""
    sums = values.sum(dim=-1)
    fields = [
        (-8 * sums).to(torch.int32),
        relative_scale.round().to(torch.int16),
        (sums * relative_scale * 2.0**-OFFSET_BITS).round().to(torch.int16),
        values.to(torch.int8).unflatten(-2, (-1, 2)).unflatten(-1, (8, 4)).transpose(-3, -2),
    ]
    split = [*(field.unflatten(-1, (-1, 2)) for field in fields[:3]), fields[3]]
    return torch.cat([field.contiguous().view(torch.uint8).flatten(2) for field in split], dim=-1)


def unpack_rows(rows: QuantizedRows) -> tuple[Tensor, Tensor, Tensor]:
    """int8 [T, terms, G, 32]; the groups' shares and shared sums, int16 [T, terms, G]."""
    pairs = rows.pairs
    values = pairs[..., 16:].contiguous().view(torch.int8).unflatten(-1, (8, 2, 4)).transpose(-3, -2)
    fields = [pairs[..., at : at + 4].contiguous().view(torch.int16).flatten(-2) for at in (8, 12)]
    return values.flatten(-2).flatten(-3, -2), fields[0], fields[1]


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, terms: int = 1, plain: Tensor | None = None
) -> tuple[QuantizedRows, Tensor]:
    """See `octavo_kernels.rms_norm_quantize`."""
    normed, total = (rms_norm(x, weight, eps), x) if residual is None else fused_add_rms_norm(x, residual, weight, eps)
    if plain is not None:
        plain.copy_(normed)
    return quantize_rows(normed, terms, second_term_where_large=True), total


def silu_and_mul_quantize(x: Tensor, terms: int = 1, plain: Tensor | None = None) -> QuantizedRows:
    """See `octavo_kernels.silu_and_mul_quantize`."""
    product = silu_and_mul(x)
    if plain is not None:
        plain.copy_(product)
    return quantize_rows(product, terms)


def quantized_linear(x: Tensor | QuantizedRows, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
    """See `octavo_kernels.quantized_linear`."""
    rows = x if isinstance(x, QuantizedRows) else quantize_rows(x, packed.activation_terms)
    result = _product(rows, packed, bias, rows.terms)
    if packed.margin:
        first = _product(rows, packed, bias, 1)
        pad = torch.nn.functional.pad(first, (0, -packed.channels % BLOCK), value=float("-inf"))
        highest = pad.unflatten(1, (-1, BLOCK)).amax(dim=2)
        near = highest >= highest.amax(dim=1, keepdim=True) - packed.margin
        return torch.where(near.repeat_interleave(BLOCK, dim=1)[:, : packed.channels], result, first)
    return result.to(rows.dtype)


def gated_linear_quantize(x: QuantizedRows, packed: PackedLinear, terms: int = 1) -> QuantizedRows:
    """See `octavo_kernels.gated_linear_quantize`."""
    return silu_and_mul_quantize(quantized_linear(x, packed), terms)


def _product(rows: QuantizedRows, packed: PackedLinear, bias: Tensor | None, terms: int) -> Tensor:
    """float32 [T, channels], by so many of the rows' terms."""
    out = []
    for part in packed.parts:
        weight = unpack_part(part, packed.groups)
        if part.kind.by_row:
            scales, values = unpack_scaled_rows(rows)
            exact = values.double() @ weight.codes.flatten(1).double().T
            out.append(exact.float() * (scales[:, None] * weight.scales[:, 0, 0]))
            continue
        out.append((_product_in_float if weight.units is None else _product_in_integers)(rows, weight, terms))
    result = torch.cat(out, dim=1)
    return result if bias is None else result + bias.float()


def _product_in_float(rows: QuantizedRows, weight: Unpacked, terms: int) -> Tensor:
    values = unpack_rows(rows)[0].double()
    integers = values[:, 0] if terms == 1 else values[:, 0] * 256.0 + values[:, 1]
    total = torch.zeros(len(values), len(weight.codes))
    for g in range(weight.codes.shape[1]):
        exact = integers[:, g] @ weight.codes[:, g].double().T
        total += exact.float() * (rows.meta[:, g, None] * weight.scales[:, g, 0])
    return total if terms == 1 else total * (1.0 / 256.0)


def _product_in_integers(rows: QuantizedRows, weight: Unpacked, terms: int) -> Tensor:
    """Multiply with the integers of the C kernels (cpu/csrc/quantized_tile.h)."""
    assert weight.units is not None
    values, relative_scale, scaled_sum = (x.double() for x in unpack_rows(rows))
    out = torch.zeros(len(values), len(weight.codes), dtype=torch.float64)
    parts = weight.scales.shape[2]  # 2: halves of groups
    codes, values = (x.double().unflatten(-1, (parts, -1)) for x in (weight.codes, values))
    for term in range(terms):
        for g in range(codes.shape[1]):
            for half in range(parts):
                exact = values[:, term, g, half] @ codes[:, g, half].T
                fits = (exact * 2.0**-weight.kind.shift + (0.5 if weight.kind.shift else 0.0)).floor()
                scaled = (fits * weight.scales[:, g, half].double() * 2.0**-SCALE_BITS + 0.5).floor()
                out += scaled * relative_scale[:, term, g, None] * 2.0 ** (-8 * term)
            if weight.offsets is not None:
                factors = [scaled_sum[:, term, g]]
                if parts == 2:
                    exact = values[:, term, g, 0].sum(dim=1) * relative_scale[:, term, g]
                    first = (exact * 2.0**-OFFSET_BITS + 0.5).floor()
                    factors = [first, factors[0] - first]
                for half, factor in enumerate(factors):
                    out += factor[:, None] * weight.offsets[:, g, half].double() * 2.0 ** (-8 * term)
    return out.float() * (rows.meta[:, -16, None] * (weight.units * 2.0**-RELATIVE_BITS))


def quantized_embedding(ids: Tensor, packed: PackedLinear, dtype: torch.dtype, first: int | None = None) -> Tensor:
    """See `octavo_kernels.quantized_embedding`."""
    return embedding(ids, dequantize(packed), first).to(dtype)
