"""Mixtures of experts, see `octavo_kernels.moe`."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.dispatch import backend_for
from octavo_kernels.moe import Experts, StackedWeight


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
    """The ``k`` experts of each row and their weights, from ``logits [T, E]``: ids int32 ``[T, k]``, the best first and
    the lowest id first among equals, and weights float32 ``[T, k]``. Ids are counted from expert number ``first`` on,
    so those before it are below 0.

    A score is the softmax over all experts or, ``kind`` "sigmoid", the sigmoid of the expert's logit. ``bias`` float32
    [E] is added to scores for the choice only. ``groups`` (n, m): only experts of the best m of n groups are chosen; a
    group's score is that of its best expert, for "sigmoid" the sum of its two best. ``renormalise`` divides the chosen
    scores by their sum; ``scale`` multiplies them, then that of each expert in ``expert_scale`` float32 [E]. Raises
    ValueError for a ``k`` or ``groups`` that E does not allow.
    """
    return backend_for(logits).topk_route(logits, k, kind, bias, groups, renormalise, scale, expert_scale, first)


def fused_moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Each row of ``x [T, H]`` through its experts ``ids`` int32 ``[T, k]``, times ``weights`` float32 ``[T, k]``, and
    added up in that order in float32: ``[T, H]`` in ``out_dtype`` (None: x.dtype). Ids of none of ``experts``, such as
    those that another rank holds, add nothing.

    ``shared [T, H]`` is added last, times the sigmoid of ``shared_gate`` float32 ``[T, 1]`` where there is one. The
    result of a row does not depend on T.
    """
    return backend_for(x).fused_moe(x, ids, weights, experts, shared, shared_gate, out_dtype)


def moe_row_counts(experts: Experts, k: int) -> list[int]:
    """Numbers of rows which, together, have `fused_moe` launch every kernel that it has for ``k`` of these experts."""
    weight = experts.gate_up
    if isinstance(weight, StackedWeight):
        weight = next(iter(weight.tensors.values()))
    return backend_for(weight if isinstance(weight, Tensor) else weight.addresses).moe_row_counts(experts, k)
