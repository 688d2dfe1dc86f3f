"""Mixtures of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.dense import DenseWeight
from octavo_kernels.group_weight import GroupWeight
from octavo_kernels.moe import Experts, ExpertTable, StackedWeight, check_route
from octavo_kernels.quant import PackedLinear
from octavo_kernels.reference.dense import dense_linear
from octavo_kernels.reference.elementwise import activate
from octavo_kernels.reference.group_weight import group_dequantize
from octavo_kernels.reference.quant import quantize_rows, quantized_linear
from octavo_kernels.reference.scaled_weight import scaled_linear
from octavo_kernels.scaled_weight import ScaledWeight


def topk_route(
    logits: Tensor,
    k: int,
    kind: str = "softmax",
    bias: Tensor | None = None,
    groups: tuple[int, int] | None = None,
    renormalise: bool = False,
    scale: float = 1.0,
    expert_scale: Tensor | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """See `octavo_kernels.topk_route`."""
    check_route(logits, k, kind, groups)
    logits = logits.float()
    scores = logits.sigmoid() if kind == "sigmoid" else logits.softmax(dim=1)
    choice = logits if bias is None and groups is None else scores if bias is None else scores + bias
    if groups is not None:
        count, kept = groups
        members = choice.unflatten(1, (count, -1))
        best = 1 if kind == "softmax" else min(2, members.shape[2])
        order = members.topk(best, dim=2).values.sum(dim=2).sort(dim=1, descending=True, stable=True).indices
        left_out = torch.ones(len(logits), count, dtype=torch.bool, device=logits.device)
        left_out = left_out.scatter(1, order[:, :kept], False)
        choice = members.masked_fill(left_out[:, :, None], -torch.inf).flatten(1)
    ids = choice.sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
    weights = weights * scale
    return (ids - first).int(), weights if expert_scale is None else weights * expert_scale[ids]


def fused_moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """See `octavo_kernels.fused_moe`."""
    results = x.new_zeros((*ids.shape, x.shape[1]), dtype=torch.float32)
    for expert in range(experts.num_experts):
        rows, choices = torch.where(ids == expert)
        if len(rows):
            results[rows, choices] = _expert(x[rows], weights[rows, choices], experts, expert)
    out = torch.zeros_like(results[:, 0])
    for choice in range(ids.shape[1]):  # in this order
        factor = 1.0 if experts.weighs_input else weights[:, choice, None]
        out = out + factor * results[:, choice]
    if shared is not None:
        out = out + (shared.float() if shared_gate is None else shared_gate.float().sigmoid() * shared.float())
    return out.to(out_dtype or x.dtype)


def _expert(x: Tensor, weights: Tensor, experts: Experts, expert: int) -> Tensor:
    """float32 ``[R, H]`` of rows ``[R, H]``."""
    sums = torch.cat([_product(x, weight) for weight in _of_expert(experts.gate_up, expert)], dim=1)
    if experts.weighs_input:
        sums = sums * weights[:, None]
    if experts.gate_up_bias is not None:
        sums = sums + experts.gate_up_bias[expert]
    if experts.activation == "clamped_swiglu":
        gate, up = sums.to(x.dtype).float().chunk(2, dim=1)
        gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
        inner = ((up + 1) * gate * (1.702 * gate).sigmoid()).to(x.dtype)
    else:
        inner = activate(sums.to(x.dtype), experts.activation, gated=True)
    (down,) = _of_expert(experts.down, expert)
    out = _product(inner, down)
    return out if experts.down_bias is None else out + experts.down_bias[expert]


def moe_row_counts(experts: Experts, k: int) -> list[int]:
    """See `octavo_kernels.moe_row_counts`: there is nothing to compile."""
    return []


Weight = Tensor | DenseWeight | PackedLinear | GroupWeight | ScaledWeight


def _of_expert(weight: Tensor | ExpertTable | StackedWeight, expert: int) -> list[Weight]:
    if isinstance(weight, ExpertTable):
        return [part[expert] for part in weight.parts]
    if isinstance(weight, Tensor):
        return [weight[expert]]
    mine, held = slice(expert * weight.channels, (expert + 1) * weight.channels), weight.weight
    if isinstance(held, ScaledWeight):
        return [ScaledWeight(held.values[mine], held.scales[:, mine])]
    return [group_dequantize(held, torch.float32)[mine]]


def _product(x: Tensor, weight: Weight) -> Tensor:
    """Multiply in float32."""
    if isinstance(weight, ScaledWeight):
        return scaled_linear(x, weight).float()
    if isinstance(weight, DenseWeight):
        return dense_linear(x, weight, out_dtype=torch.float32)
    if isinstance(weight, PackedLinear):
        return quantized_linear(quantize_rows(x.float(), weight.activation_terms), weight)
    assert isinstance(weight, Tensor)
    return torch.nn.functional.linear(x, weight.to(x.dtype)).float()
