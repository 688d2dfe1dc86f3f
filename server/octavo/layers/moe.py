"""Mixtures of experts: blocks that send each row through a few of many MLPs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import octavo_kernels
from octavo.layers.activation import activation_kind
from octavo.layers.linear import ExactLinear, ReplicatedLinear
from octavo.layers.mlp import GatedMLP, SquaredMLP
from octavo.layers.parallel import TensorParallel
from octavo.layers.quantization.base import ExpertsBase, ExpertSettings
from octavo.layers.weights import WeightSlot, fill_tensor


@dataclass(frozen=True)
class Routing:
    """The choice of experts, see `octavo_kernels.topk_route`. ``correction``: the choice has a bias
    (e_score_correction_bias); ``bias``: the router's logits have one; ``expert_scale``: each expert's weights have a
    factor (per_expert_scale)."""

    top_k: int
    kind: str = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    groups: tuple[int, int] | None = None
    correction: bool = False
    bias: bool = False
    expert_scale: bool = False


class Router(ExactLinear):
    """Logits float32 ``[T, E]``, of which the experts are chosen."""

    e_score_correction_bias: Tensor | None
    per_expert_scale: Tensor | None

    def __init__(self, hidden_size: int, num_experts: int, routing: Routing, tp: TensorParallel) -> None:
        super().__init__(hidden_size, num_experts, routing.bias, tp)
        held = {"e_score_correction_bias": routing.correction, "per_expert_scale": routing.expert_scale}
        for name, there in held.items():
            numbers = torch.empty(num_experts, dtype=torch.float32) if there else None
            self.register_buffer(name, numbers, persistent=False)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The weight's, and what there is of each expert."""
        yield from super().weight_slots()
        numbers = {"e_score_correction_bias": self.e_score_correction_bias, "per_expert_scale": self.per_expert_scale}
        for name, target in numbers.items():
            if target is not None:
                yield WeightSlot(0, name, tuple(target.shape), partial(fill_tensor, target))


class FusedMoE(nn.Module):
    """Sends each row through the experts that ``gate`` chooses for it and, if there is one, through a ``shared`` MLP,
    which may have a gate of its own (Qwen2-MoE)."""

    def __init__(
        self,
        settings: ExpertSettings,
        routing: Routing,
        tp: TensorParallel,
        shared: GatedMLP | SquaredMLP | None = None,
        gates_shared: bool = False,
        hidden_size: int | None = None,
    ) -> None:
        """``hidden_size``: of the rows, where it is not what experts read."""
        super().__init__()
        self.routing, self.tp = routing, tp
        self.gate = Router(hidden_size or settings.hidden_size, settings.num_experts, routing, tp)
        self.experts = ExpertsBase(settings, tp)
        self.shared_expert = shared
        self.shared_expert_gate = ExactLinear(settings.hidden_size, 1, False, tp) if gates_shared else None

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, H]``; returns ``[T, H]``."""
        ids, weights = self.route(x)
        shared = None if self.shared_expert is None else self.shared_expert(x)
        gate = None if self.shared_expert_gate is None else self.shared_expert_gate(x)
        if self.tp.rank > 0:
            shared = None  # it is whole on every rank: one of them adds it
        out: Tensor = self.experts(x, ids, weights, shared, gate)
        return out

    def serve_others(self, dtype: torch.dtype) -> None:
        """Compute the rows of other replicas, which have activations in ``dtype``, in a step without rows here."""
        k = self.routing.top_k
        ids, weights = torch.empty((0, k), dtype=torch.int32), torch.empty((0, k), dtype=torch.float32)
        self.experts(torch.empty((0, self.experts.settings.hidden_size), dtype=dtype), ids, weights)

    def warm_up(self, max_rows: int) -> None:
        """Compute for so many rows, up to ``max_rows``, that every kernel which may be launched is compiled."""
        weight = self.gate.weight
        for rows in self.experts.method.row_counts(self.experts, self.routing.top_k):
            self(torch.zeros(min(rows, max_rows), self.gate.input_size, dtype=weight.dtype, device=weight.device))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each row, counted from `ExpertsBase.first`, and their weights, see
        `octavo_kernels.topk_route`."""
        how, gate = self.routing, self.gate
        correction, scales = gate.e_score_correction_bias, gate.per_expert_scale
        return octavo_kernels.topk_route(
            gate(x), how.top_k, how.kind, correction, how.groups, how.renormalise, how.scale, scales, self.experts.first
        )


class LatentMoE(FusedMoE):
    """Experts that read and write fewer columns than rows have, between two projections; the shared MLP has them all
    (Nemotron 3 Super)."""

    def __init__(
        self,
        settings: ExpertSettings,
        routing: Routing,
        tp: TensorParallel,
        shared: GatedMLP | SquaredMLP,
        hidden_size: int,
        bias: bool,
    ) -> None:
        super().__init__(settings, routing, tp, shared, hidden_size=hidden_size)
        self.fc1_latent_proj = ReplicatedLinear(hidden_size, settings.hidden_size, bias, tp)
        self.fc2_latent_proj = ReplicatedLinear(settings.hidden_size, hidden_size, bias, tp)

    def forward(self, x: Tensor) -> Tensor:
        """See `FusedMoE`."""
        assert self.shared_expert is not None
        latent = self.experts(self.fc1_latent_proj(x), *self.route(x))
        return octavo_kernels.add(self.fc2_latent_proj(latent), self.shared_expert(x))


def expert_settings(num_experts: int, hidden_size: int, inner_size: int, act: str) -> ExpertSettings:
    """Settings of gated experts without biases; ``act`` is config.json's name."""
    return ExpertSettings(num_experts, hidden_size, inner_size, activation_kind(act))
