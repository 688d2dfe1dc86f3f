"""How many bytes a model's weights take once they are loaded, from its shapes and the headers of its files alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from octavo.interface.engine_config import ModelConfig
from octavo.layers.parallel import TensorParallel
from octavo.layers.weights import WeightSource
from octavo.loader.checkpoint import iterate_weights
from octavo.loader.load_model import build_model, weight_slots
from octavo.models.base import CausalLM


@dataclass(frozen=True)
class WeightSize:
    """Of one rank. ``parameters`` counts numbers, however they are stored; ``nbytes`` is what they take in memory."""

    nbytes: int
    parameters: int


def weight_size(model: CausalLM, stored: Mapping[str, str]) -> WeightSize:
    """Of ``model``, whose parameters may be without memory, filled with tensors of the types ``stored`` (by their names
    in the checkpoint; others count as float32)."""
    slots = weight_slots(model)
    qtypes = {model.weight_name(name): qtype for name, qtype in stored.items()}
    extra = sum(slot.extra_bytes(qtypes.get(name, "F32")) for name, takers in slots.items() for slot in takers)
    first = [takers[0] for takers in slots.values()]
    groups = {id(slot.group): slot.group for slot in first if slot.group is not None}
    parameters = sum(prod(slot.shape) for slot in first if slot.shape is not None)
    parameters += sum(group.parameters for group in groups.values())
    return WeightSize(model.num_weight_bytes() + extra, parameters)


def model_without_memory(
    config: ModelConfig,
    device: torch.device | str,
    tp: TensorParallel | None = None,
    stored: Sequence[tuple[str, WeightSource]] | None = None,
) -> CausalLM:
    """What `load_model` would return, of meta tensors; ``stored`` as in `build_model`. Raises ModelError and
    ConfigError as that does."""
    return build_model(config, device, tp or TensorParallel(), stored, without_memory=True)


def stored_weights(config: ModelConfig, load_format: str = "auto") -> list[tuple[str, WeightSource]]:
    """The checkpoint's tensors, unread; none for a dummy. Raises ModelError."""
    return [] if load_format == "dummy" else list(iterate_weights(config.files))


def stored_types(config: ModelConfig, load_format: str = "auto") -> dict[str, str]:
    """How each tensor of the checkpoint is stored, by name. Reads headers alone. Raises ModelError."""
    return {name: source.qtype for name, source in stored_weights(config, load_format)}
