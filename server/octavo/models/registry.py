"""From the architecture's name in config.json to the class; nothing is imported before it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from octavo.interface.architectures import MODELS, PREDICTION_LAYERS, check_architecture

if TYPE_CHECKING:
    from octavo.models.base import Model


def model_class(architecture: str) -> type[Model]:
    """The class of ``architecture``; ModelError when there is none."""
    if architecture in PREDICTION_LAYERS.values():
        return cast("type[Model]", getattr(import_module("octavo.models.mtp"), architecture))
    check_architecture(architecture)
    return cast("type[Model]", getattr(import_module(f"octavo.models.{MODELS[architecture]}"), architecture))
