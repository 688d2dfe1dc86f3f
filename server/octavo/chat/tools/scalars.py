"""Schemas of tools' arguments, and Lark for their numbers. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.chat.tools.formats.row import Format

NUMBERS = ("integer", "number")
BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
# Arguments of which a grammar holds only that the format can write them.
ANY_ARGUMENTS: dict[str, Any] = {"type": "object", "additionalProperties": True}
OF_ANY = ("description", "title", "default", "examples")  # keywords that demand nothing


def parameters_of(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, which are always an object."""
    schema = function.get("parameters")
    if not schema:
        return {"type": "object", "additionalProperties": False}
    return schema if "type" in schema or "$ref" in schema else {"type": "object", **schema}


def takes_any(schema: Any) -> bool:
    """True if a schema says nothing of an object's properties, and allows them."""
    return schema.get("additionalProperties") is True and not schema.get("properties") and not schema.get("required")


def integer_and_number(row: Format) -> tuple[str, str]:
    """Lark for an integer and a number: as a template writes them, which is as Python does, or in any way of JSON where
    the template is unknown."""
    if row.gaps is None:
        return "/-?(0|[1-9][0-9]{0,18})/", r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?/"
    large = r"-?[1-9][0-9]{0,7}\.(0|[0-9]{0,6}[1-9])|-?[1-9][0-9]{8,10}\.(0|[0-9]{0,3}[1-9])"
    small = r"0\.0|-?0\.0{0,3}[1-9]([0-9]{0,9}[1-9])?"
    exponent = r"-?[1-9](\.[0-9]{0,8}[1-9])?e(-(0[5-9]|[1-9][0-9])|\+(1[6-9]|[2-9][0-9]))"
    return "/0|-?[1-9][0-9]{0,18}/", f"/0|-?[1-9][0-9]{{0,14}}|{large}|{small}|{exponent}/"


def bounded(kind: str, schema: Mapping[str, Any]) -> str:
    """Lark for a number within the limits of its schema."""
    return "%json " + json.dumps({"type": kind, **{name: schema[name] for name in sorted(schema.keys() & BOUNDS)}})
