"""Tool call formats by name, and which of them a chat template uses."""

from __future__ import annotations

from octavo.entrypoints.generation.tools.parsers.core import CallPiece, Piece, Reasoning, ToolParser
from octavo.entrypoints.generation.tools.parsers.formats import (
    HermesParser,
    JsonListParser,
    Llama3JsonParser,
    MistralParser,
    NamedCallParser,
)
from octavo.entrypoints.generation.tools.parsers.harmony import HarmonyParser
from octavo.entrypoints.generation.tools.parsers.pythonic import PythonicParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "openai": HarmonyParser,
    "pythonic": PythonicParser,
    "qwen3": HermesParser,
}

# What a template that describes a format contains, the most specific first.
_SIGNS = (
    ("<|channel|>final", "openai"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("func_name1(params_name1", "pythonic"),
    ('"parameters": ', "llama3_json"),
)


def detect(template: str) -> str | None:
    """The format that a chat template describes to the model; None if it is unknown."""
    return next((name for sign, name in _SIGNS if sign in template), None)


__all__ = [
    "TOOL_PARSERS",
    "CallPiece",
    "HarmonyParser",
    "JsonListParser",
    "NamedCallParser",
    "Piece",
    "Reasoning",
    "ToolParser",
    "detect",
]
