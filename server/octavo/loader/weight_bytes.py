"""How many bytes a model's weights take once they are loaded, from its shapes and the headers of its files alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from octavo.interface.engine_config import ModelConfig
from octavo.layers.parallel import TensorParallel
from octavo.layers.weights import WeightSource
from octavo.loader.load_model import build_model, weight_slots
from octavo.models.base import Model


@dataclass(frozen=True)
class WeightSize:
    """Of one rank. ``parameters`` counts numbers, however they are stored; ``nbytes`` is what they take in memory."""

    nbytes: int
    parameters: int


def weight_size(model: Model, stored: Iterable[tuple[str, WeightSource]]) -> WeightSize:
    """Of ``model``, whose parameters may be without memory, filled with the checkpoint's tensors, ``stored`` (others
    count as float32)."""
    slots = weight_slots(model)
    qtypes = {model.weight_name(name): source.qtype for name, source in stored}
    extra = sum(slot.extra_bytes(qtypes.get(name, "F32")) for name, takers in slots.items() for slot in takers)
    first = [takers[0] for takers in slots.values()]
    groups = {id(slot.group): slot.group for slot in first if slot.group is not None}
    parameters = sum(prod(slot.shape) for slot in first if slot.shape is not None and not slot.optional)
    parameters += sum(group.parameters for group in groups.values())
    return WeightSize(model.num_weight_bytes() + extra, parameters)


def model_without_memory(
    config: ModelConfig,
    device: torch.device | str,
    tp: TensorParallel | None = None,
    stored: Sequence[tuple[str, WeightSource]] | None = None,
) -> Model:
    """What `load_model` would return, of meta tensors; ``stored`` as in `build_model`. Raises ModelError and
    ConfigError as that does."""
    return build_model(config, device, tp or TensorParallel(), stored, without_memory=True)
