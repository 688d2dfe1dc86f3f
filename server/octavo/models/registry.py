"""Find the class of config.json's architecture; nothing is imported before it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from octavo.interface.architectures import DRAFTERS, MODELS, check_architecture

if TYPE_CHECKING:
    from octavo.models.base import Model


def model_class(architecture: str) -> type[Model]:
    """The class of ``architecture``; ModelError when there is none."""
    module = DRAFTERS.get(architecture)
    if module is None:
        check_architecture(architecture)
        module = MODELS[architecture]
    return cast("type[Model]", getattr(import_module(f"octavo.models.{module}"), architecture))
