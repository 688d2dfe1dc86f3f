"""Mixtures of experts: the weights of E gated MLPs, of which each row of activations goes through k.

Shapes: T rows, E experts, k of them a row, H hidden size, I inner size of an expert. `octavo_kernels.topk_route`
chooses the experts of each row, `octavo_kernels.fused_moe` computes them and adds them up. Both depend on a row's own
data only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_kernels.dense import DenseWeight
from octavo_kernels.group_weight import GroupWeight
from octavo_kernels.quant import PackedLinear
from octavo_kernels.scaled_weight import ScaledWeight

ROUTINGS = ("softmax", "sigmoid")


@dataclass(frozen=True)
class ExpertTable:
    """Weights of E experts, each packed by itself for the CPU's kernels: ``parts[p][e]``, all of one class.

    Gates and ups are two parts, the same one twice where experts have no gates of their own: the kernels compute it
    once. ``addresses`` int64 [parts, E, 3] says where each expert's weight lies, and in which
    dtype or kind; the weights do not move.
    """

    parts: tuple[tuple[DenseWeight | PackedLinear, ...], ...]
    addresses: Tensor

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.parts[0])

    @property
    def channels(self) -> int:
        """Channels of an expert, all parts together: 2 I of gates and ups, H of downs."""
        return sum(part[0].channels for part in self.parts)

    @property
    def width(self) -> int:
        """Columns of an expert's weights."""
        return self.parts[0][0].width


@dataclass(frozen=True)
class StackedWeight:
    """Weights of E experts as one for GPUs: the channels of the first, then those of the second and so on. Columns keep
    their order."""

    weight: GroupWeight | ScaledWeight
    num_experts: int

    @property
    def channels(self) -> int:
        """Channels of an expert."""
        held = self.weight
        return (held.channels if isinstance(held, GroupWeight) else len(held.values)) // self.num_experts

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors on the device, by field; scaled ones come first."""
        held = self.weight
        return held.tensors if isinstance(held, GroupWeight) else {"values": held.values, "scales": held.scales}


@dataclass(frozen=True)
class Experts:
    """``down(act(gate(x)) * up(x))`` of each expert.

    ``gate_up`` [E, 2 I, H], gates before ups, and ``down`` [E, H, I] are tensors of x's dtype, or the same numbers in a
    form of a backend's own (`ExpertTable`, `StackedWeight`). Biases are float32 [E, 2 I] and [E, H]. ``activation``:
    what `activate` knows, or "clamped_swiglu" (gpt-oss): ``(clamp(up, -limit, limit) + 1) * g * sigmoid(1.702 g)``
    with ``g = min(gate, limit)``. ``weighs_input``: a row's weight is applied to what its expert reads (Llama 4), not
    to what it gives.
    """

    gate_up: Tensor | ExpertTable | StackedWeight
    down: Tensor | ExpertTable | StackedWeight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: str = "silu"
    limit: float = 7.0
    weighs_input: bool = False

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.gate_up) if isinstance(self.gate_up, Tensor) else self.gate_up.num_experts


def check_route(logits: Tensor, k: int, kind: str, groups: tuple[int, int] | None) -> None:
    """Raise ValueError for what `octavo_kernels.topk_route` does not take."""
    experts = logits.shape[1]
    if kind not in ROUTINGS:
        raise ValueError(f"kind: {kind!r} is not a way to route; choose one of {', '.join(ROUTINGS)}")
    count, kept = groups or (1, 1)
    if count < 1 or experts % count or not 1 <= kept <= count:
        raise ValueError(f"groups: {kept} of {count} groups cannot be kept of {experts} experts")
    if not 1 <= k <= experts // count * kept:
        raise ValueError(f"k: {k} experts a row cannot be chosen of {experts // count * kept}")


def expert_table(parts: Sequence[Sequence[DenseWeight | PackedLinear]]) -> ExpertTable:
    """Weights ``parts[p][e]`` of which each is of one dtype or kind. Raises ValueError where they are unlike."""
    rows = []
    for part in parts:
        for weight in part:
            if len(weight.parts) != 1 or (weight.channels, weight.width) != (part[0].channels, parts[0][0].width):
                raise ValueError("parts: every expert must have weights of one shape, each of one kind")
            (piece,) = weight.parts
            if isinstance(weight, PackedLinear):
                kind = weight.parts[0].kind
                rows.append([piece.data.data_ptr(), kind.bits, kind.flags])
            else:
                rows.append([piece.data.data_ptr(), 0, 0])
    classes = {type(weight) for part in parts for weight in part}
    dtypes = {weight.parts[0].data.dtype for part in parts for weight in part}
    if len(classes) != 1 or len(dtypes) != 1:
        raise ValueError("parts: every expert must be held in the same way")
    addresses = torch.tensor(rows, dtype=torch.int64).view(len(parts), len(parts[0]), 3)
    return ExpertTable(tuple(tuple(part) for part in parts), addresses)
