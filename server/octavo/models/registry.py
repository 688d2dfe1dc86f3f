"""From the architecture's name in config.json to the class; nothing is imported before it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from octavo.errors import ModelError

if TYPE_CHECKING:
    from octavo.models.base import CausalLM

_MODELS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "OPTForCausalLM": "opt",
}


def model_class(architecture: str) -> type[CausalLM]:
    """The class of ``architecture``; ModelError when there is none."""
    if architecture not in _MODELS:
        said = f"architecture {architecture!r} is" if architecture else "config.json names no architecture, that is"
        raise ModelError(f"{said} not supported; known are {', '.join(_MODELS)}")
    return cast("type[CausalLM]", getattr(import_module(f"octavo.models.{_MODELS[architecture]}"), architecture))
