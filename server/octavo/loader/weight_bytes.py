"""Compute the memory of a model's loaded weights, from its shapes and the headers of its files alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import torch

from octavo.interface.engine_config import ModelConfig
from octavo.layers.latent_attention import LatentSelfAttention
from octavo.layers.parallel import TensorParallel
from octavo.layers.quantization.base import ExpertsBase
from octavo.layers.vision import TowerLinear
from octavo.layers.weights import WeightSlot, WeightSource
from octavo.loader.load_model import build_model, weight_slots
from octavo.models.base import Model


@dataclass(frozen=True)
class WeightSize:
    """Size of one rank's weights. ``parameters`` counts numbers, however they are stored; ``nbytes`` is their
    memory."""

    nbytes: int
    parameters: int


def weight_size(
    model: Model, stored: Iterable[tuple[str, WeightSource]], device: torch.device | str = "cpu"
) -> WeightSize:
    """Measure ``model``, whose parameters may be meta tensors, filled with the checkpoint's tensors ``stored`` (others
    count as float32), on ``device``."""
    slots = weight_slots(model)
    qtypes = {model.weight_name(name): source.qtype for name, source in stored}
    extra = {name: sum(slot.extra_bytes(qtypes.get(name, "F32")) for slot in takers) for name, takers in slots.items()}
    first = {name: takers[0] for name, takers in slots.items()}
    parameters = _count(first.values())
    nbytes = model.num_weight_bytes() + sum(extra.values())
    for path, layer in model.named_modules():
        if isinstance(layer, LatentSelfAttention) and layer.kv_b_proj is not None:
            own = chain(layer.kv_b_proj.parameters(), layer.kv_b_proj.buffers())
            nbytes -= sum(tensor.nbytes for tensor in own)
            nbytes -= sum(size for name, size in extra.items() if name.startswith(f"{path}.kv_b_proj."))
            nbytes += layer.absorbed_bytes(torch.device(device).type == "cpu")
        elif isinstance(layer, ExpertsBase):
            nbytes += layer.stands_for * layer.method.extra_bytes(layer)
            if others := layer.stands_for - 1:
                names = [name for name in first if name.startswith(f"{path}.")]
                held = sum(tensor.nbytes for tensor in chain(layer.parameters(), layer.buffers()))
                nbytes += others * (held + sum(extra[name] for name in names))
                parameters += others * _count(first[name] for name in names)
        elif isinstance(layer, TowerLinear) and torch.device(device).type != "cpu":  # which packs nothing
            nbytes += prod(layer.shape) * layer.weight.element_size() - layer.weight.nbytes
    return WeightSize(nbytes, parameters)


def _count(slots: Iterable[WeightSlot]) -> int:
    """Count the numbers that they take, however these are stored."""
    listed = list(slots)
    groups = {id(slot.group): slot.group for slot in listed if slot.group is not None}
    plain = sum(prod(slot.shape) for slot in listed if slot.shape is not None and not slot.optional)
    return plain + sum(group.parameters for group in groups.values())


def model_without_memory(
    config: ModelConfig,
    device: torch.device | str,
    tp: TensorParallel | None = None,
    stored: Sequence[tuple[str, WeightSource]] | None = None,
    *,
    measured: bool = False,
) -> Model:
    """Build the result of `load_model` from meta tensors; ``stored`` and ``measured`` as in `build_model`.
    Raises ModelError and ConfigError like `load_model`."""
    return build_model(config, device, tp or TensorParallel(), stored, without_memory=True, measured=measured)
