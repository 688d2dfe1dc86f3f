"""The constraint on the form of the answer, under all the names that OpenAI, vLLM, llama.cpp and SGLang give it."""

from __future__ import annotations

from typing import Any

from octavo.chat.structured import Constraint, make_constraint, schema_constraint
from octavo.entrypoints.errors import bad_request, shown
from octavo.entrypoints.fields.schemas import KINDS, WITHOUT_EFFECT
from octavo.entrypoints.openai.protocol import GenerationRequest

_ALIASES = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}  # vLLM's older names
_ALIASES |= {"json_schema": "json", "regex": "regex"}  # llama.cpp's and SGLang's


def constraint_of(body: GenerationRequest) -> Constraint | None:
    """The one constraint of a request. Raises APIError naming the field."""
    found = [
        constraint
        for constraint in (_response_format(body), _structured_outputs(body), *_aliases(body))
        if constraint is not None
    ]
    if len(found) > 1:
        fields = ", ".join(constraint.field for constraint in found)
        raise bad_request(f"{found[1].field} must be the only constraint, got {fields}: keep one", found[1].field)
    if not found:
        return None
    found[0].allows_calls = found[0].field.startswith("response_format")  # the others may spell calls out
    return found[0]


def _response_format(body: GenerationRequest) -> Constraint | None:
    value = body.response_format
    if value is None:
        return None
    match value.get("type"):
        case "text":
            return None
        case "json_object" if value.get("schema") is not None:  # llama.cpp's way of json_schema
            return schema_constraint({"schema": value["schema"]}, "response_format")
        case "json_object":
            return make_constraint("response_format", json_object=True)
        case "json_schema":
            return schema_constraint(value.get("json_schema"), "response_format.json_schema")
    raise bad_request(
        f'response_format.type must be "text", "json_object" or "json_schema", got {shown(value.get("type"))}',
        "response_format.type",
    )


def _structured_outputs(body: GenerationRequest) -> Constraint | None:
    value = body.structured_outputs
    if value is None:
        return None
    for name, setting in value.items():
        if name not in KINDS and name not in WITHOUT_EFFECT and setting is not None and setting is not False:
            raise bad_request(
                f"structured_outputs.{shown(name)} is not supported: use one of {', '.join(KINDS)}",
                "structured_outputs",
            )
    given = {kind: value[kind] for kind in KINDS if value.get(kind) not in (None, False)}
    field = f"structured_outputs.{next(iter(given))}" if len(given) == 1 else "structured_outputs"
    return _checked(field, given)


def _aliases(body: GenerationRequest) -> list[Constraint]:
    return [
        _checked(field, {kind: value})
        for field, kind in _ALIASES.items()
        if (value := getattr(body, field)) is not None
    ]


def _checked(field: str, given: dict[str, Any]) -> Constraint:
    types = {"json": str | dict, "json_object": bool, "regex": str, "choice": list, "grammar": str}
    for kind, value in given.items():
        if not isinstance(value, types[kind]):
            what = {"json": "a JSON schema", "json_object": "true or false", "choice": "a list of strings"}
            raise bad_request(f"{field} must be {what.get(kind, 'a string')}, got {shown(value)}", field)
    return make_constraint(field, **given)
