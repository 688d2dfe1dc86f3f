"""The choice of experts: one program a row, whose scores it holds in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.moe import check_route
from octavo_kernels.triton.dependent_launch import pdl_options, wait_for_previous_kernel


@triton.jit
def kept_groups(choice, there, GROUPS: tl.constexpr, KEPT: tl.constexpr, SUM_OF_TWO: tl.constexpr):
    """Mark the groups whose members ``choice [groups, members]`` may be chosen: [groups], the lowest first among
    equals.

    A group's score is that of its best member or, with SUM_OF_TWO, the sum of its two best.
    """
    open_choice = tl.where(there, choice, float("-inf"))
    score = tl.max(open_choice, 1)
    if SUM_OF_TWO:
        member = tl.arange(0, choice.shape[1])[None, :]
        first = tl.min(tl.where(open_choice == score[:, None], member, choice.shape[1]), 1)
        score += tl.max(tl.where(member == first[:, None], float("-inf"), open_choice), 1)
    group = tl.arange(0, choice.shape[0])
    score = tl.where(group < GROUPS, score, float("-inf"))
    left, right = score[:, None], tl.reshape(score, (1, choice.shape[0]))
    before = (right > left) | ((right == left) & (group[None, :] < group[:, None]))
    return tl.sum(before.to(tl.int32), 1) < KEPT


@triton.jit
def route_kernel(
    logits_ptr,
    logits_stride,
    bias_ptr,
    expert_scale_ptr,
    ids_ptr,
    weights_ptr,
    scale,
    E: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_EXPERT_SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    MEMBERS_PAD: tl.constexpr,
    RENORMALISE: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Grid (rows). Scores lie as [groups, members]."""
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    MEMBERS: tl.constexpr = E // GROUPS
    group = tl.arange(0, GROUPS_PAD)[:, None]
    member = tl.arange(0, MEMBERS_PAD)[None, :]
    there = (group < GROUPS) & (member < MEMBERS)
    expert = group * MEMBERS + member
    logits = tl.load(logits_ptr + row * logits_stride + expert, mask=there, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        powers = tl.where(there, tl.exp(logits - tl.max(logits)), 0.0)
        scores = powers / tl.sum(powers)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + expert, mask=there, other=0.0)
    elif GROUPS == 1:
        choice = logits  # scores that are 0 or 1 after rounding still have an order
    choice = tl.where(choice != choice, float("inf"), choice)  # a row of NaN has experts too, whose weights are NaN
    open_ = there
    if KEPT < GROUPS:
        open_ = open_ & kept_groups(choice, there, GROUPS, KEPT, SIGMOID and MEMBERS > 1)[:, None]
    place = tl.arange(0, TOPK_PAD)
    ids = tl.zeros([TOPK_PAD], tl.int32)
    weights = tl.zeros([TOPK_PAD], tl.float32)
    total = 0.0
    for i in range(TOPK):
        best = tl.max(tl.where(open_, choice, float("-inf")))
        chosen = tl.min(tl.where(open_ & (choice == best), expert, E - 1))
        weight = tl.sum(tl.where(expert == chosen, scores, 0.0))
        open_ = open_ & (expert != chosen)
        total += weight
        ids = tl.where(place == i, chosen, ids)
        weights = tl.where(place == i, weight, weights)
    if RENORMALISE:
        weights = weights / (total + 1e-20)
    weights = weights * scale
    if HAS_EXPERT_SCALE:
        weights = weights * tl.load(expert_scale_ptr + ids)
    tl.store(ids_ptr + row * TOPK + place, ids - FIRST, mask=place < TOPK)
    tl.store(weights_ptr + row * TOPK + place, weights, mask=place < TOPK)


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
    rows, experts = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    ids = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    count, kept = groups or (1, 1)
    width = triton.next_power_of_2(count) * triton.next_power_of_2(experts // count)
    if rows:
        route_kernel[(rows,)](
            logits,
            logits.stride(0),
            logits if bias is None else bias,
            logits if expert_scale is None else expert_scale,
            ids,
            weights,
            float(scale),
            E=experts,
            TOPK=k,
            TOPK_PAD=triton.next_power_of_2(k),
            SIGMOID=kind == "sigmoid",
            HAS_BIAS=bias is not None,
            HAS_EXPERT_SCALE=expert_scale is not None,
            GROUPS=count,
            KEPT=kept,
            GROUPS_PAD=triton.next_power_of_2(count),
            MEMBERS_PAD=triton.next_power_of_2(experts // count),
            RENORMALISE=renormalise,
            FIRST=first,
            num_warps=1 if width <= 256 else 4,
            **pdl_options(logits.device),
        )
    return ids, weights
