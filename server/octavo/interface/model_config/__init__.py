"""A model's config.json, parsed once into a class of its family, with every default in one place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any, cast

from octavo.interface.architectures import DRAFTERS, MODELS
from octavo.interface.config_checks import Name
from octavo.interface.model_config.declarations import null_means_none
from octavo.interface.model_config.text import TextConfig

# Fields that mean something else where config.json says them than by default.
_UNSAID = ("architecture", "tie_word_embeddings", "use_sliding_window")
_TASK = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)$")


def config_class(architecture: str) -> type[TextConfig]:
    """Return the config class of an architecture: for ``Qwen3ForCausalLM``, ``Qwen3Config`` of the module here that is
    named like the family's in `octavo.models`; for a family's other tasks, that of its language model. A family without
    such a module has Llama's fields and defaults."""
    family = _TASK.sub("", architecture)
    module = DRAFTERS.get(architecture) or MODELS.get(f"{family}ForCausalLM") or MODELS[architecture]
    name = f"{__name__}.{module}"
    try:
        return cast("type[TextConfig]", getattr(import_module(name), f"{family}Config"))
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return TextConfig


def parse_config(config: Mapping[str, Any], source: str, name: Name = str) -> TextConfig:
    """`TextConfig.parse` of the family that ``config`` names as its architecture."""
    return config_class(config["architectures"][0]).parse(config, source, name)


def check_config(config: Mapping[str, Any], source: str, name: Name = str) -> dict[str, Any]:
    """``config`` under common names, with its family's defaults and without nulls. Raises ModelError."""
    text = parse_config(config, source, name)
    found = {key: value for key, value in type(text).in_common_words(config).items() if value is not None}
    for field in fields(text):
        value = getattr(text, field.name)
        if value is not None and (field.name not in _UNSAID or field.name in found):
            found[field.name] = value
        elif (
            value is None and null_means_none(type(text), field.name) and (field.name in config or field.name in found)
        ):
            found[field.name] = None
        elif value is None:
            found.pop(field.name, None)
    return found
