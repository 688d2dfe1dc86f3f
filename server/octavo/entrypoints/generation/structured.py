"""The constraints that a request puts on the form of its answer, under all the names they have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.entrypoints.errors import bad_request, shown
from octavo.entrypoints.generation.reasoning import BEGIN, END
from octavo.entrypoints.openai.field_schemas import WITHOUT_EFFECT
from octavo.interface.structured_output import StructuredOutputsParams, to_grammar

if TYPE_CHECKING:
    from octavo.entrypoints.openai.protocol import GenerationRequest

_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}  # vLLM's older names
_GUIDED |= {"json_schema": "json", "regex": "regex"}  # llama.cpp's and SGLang's


@dataclass
class Constraint:
    """What the answer must be like, and the field in which the client said so."""

    params: StructuredOutputsParams
    field: str
    lenient: bool = False  # keywords that no grammar can hold are ignored, instead of refused

    def grammar(self, strict: bool) -> str:
        """``strict``: as for `to_grammar`. Raises APIError naming the client's field."""
        try:
            return to_grammar(self.params, strict=strict, lenient=self.lenient)
        except ValueError as error:
            raise _named(error, self.field) from None


@dataclass
class CallGrammar:
    """How a model writes calls of its tools."""

    rule: str  # all calls of an answer: Lark, with special tokens as {<token>} or {[TOKEN]}
    parts: dict[str, str]  # grammars that the rule refers to, by their names: @name
    rules: str = ""  # further Lark that it refers to


def _named(error: ValueError, field: str) -> Exception:
    """An error about structured_outputs.<kind>, told in the client's words."""
    subject, _, rest = str(error).partition(" ")
    return bad_request(f"{field} {rest}", field) if subject.startswith("structured_outputs") else error


def constraint_of(body: GenerationRequest) -> Constraint | None:
    """The one constraint of a request. Raises APIError naming the field."""
    found = [
        constraint
        for constraint in (_response_format(body), _structured_outputs(body), *_guided(body))
        if constraint is not None
    ]
    if len(found) > 1:
        fields = ", ".join(constraint.field for constraint in found)
        raise bad_request(f"{found[1].field} must be the only constraint, got {fields}: keep one", found[1].field)
    return found[0] if found else None


def _make(field: str, **kind: Any) -> Constraint:
    try:
        return Constraint(StructuredOutputsParams(**kind), field)
    except ValueError as error:
        raise _named(error, field) from None


def _response_format(body: GenerationRequest) -> Constraint | None:
    value = body.response_format
    if value is None:
        return None
    match value.get("type"):
        case "text":
            return None
        case "json_object" if value.get("schema") is not None:  # llama.cpp's way of json_schema
            return _json_schema({"schema": value["schema"]}, "response_format")
        case "json_object":
            return _make("response_format", json_object=True)
        case "json_schema":
            return _json_schema(value.get("json_schema"))
    raise bad_request(
        f'response_format.type must be "text", "json_object" or "json_schema", got {shown(value.get("type"))}',
        "response_format.type",
    )


def _json_schema(value: Any, field: str = "response_format.json_schema") -> Constraint:
    if not isinstance(value, dict):
        raise bad_request(f'{field} must be an object with "name" and "schema", got {shown(value)}', field)
    schema, strict = value.get("schema"), value.get("strict")
    if not isinstance(schema, dict | bool):
        raise bad_request(f"{field}.schema must be a JSON schema, got {shown(schema)}", f"{field}.schema")
    if strict is not None and not isinstance(strict, bool):
        raise bad_request(f"{field}.strict must be true or false, got {shown(strict)}", f"{field}.strict")
    constraint = _make(f"{field}.schema", json=json.dumps(schema))
    constraint.lenient = not strict
    return constraint


def _structured_outputs(body: GenerationRequest) -> Constraint | None:
    value = body.structured_outputs
    if value is None:
        return None
    for name, setting in value.items():
        if name not in _KINDS and name not in WITHOUT_EFFECT and setting is not None and setting is not False:
            raise bad_request(
                f"structured_outputs.{shown(name)} is not supported: use one of {', '.join(_KINDS)}",
                "structured_outputs",
            )
    given = {kind: value[kind] for kind in _KINDS if value.get(kind) not in (None, False)}
    field = f"structured_outputs.{next(iter(given))}" if len(given) == 1 else "structured_outputs"
    return _checked(field, given)


def _guided(body: GenerationRequest) -> list[Constraint]:
    return [
        _checked(field, {kind: value}) for field, kind in _GUIDED.items() if (value := getattr(body, field)) is not None
    ]


def _checked(field: str, given: dict[str, Any]) -> Constraint:
    types = {"json": str | dict, "json_object": bool, "regex": str, "choice": list, "grammar": str}
    for kind, value in given.items():
        if not isinstance(value, types[kind]):
            what = {"json": "a JSON schema", "json_object": "true or false", "choice": "a list of texts"}
            raise bad_request(f"{field} must be {what.get(kind, 'a text')}, got {shown(value)}", field)
    return _make(field, **given)


def after_thoughts(grammar: str, inside: bool, token_id: Callable[[str], int | None]) -> str:
    """A grammar whose answer may follow thoughts, or must when the prompt has opened them (``inside``).

    ``token_id``: of a text that is one token of the model's vocabulary. Such tags are told from text by llguidance.
    """
    opening, closing = _literal(BEGIN, token_id), _literal(END, token_id)
    thoughts = rf"({opening})? thoughts" if inside else rf"(/\n{{0,2}}/ {opening} thoughts)?"
    if token_id(END) is None:
        rule = f"thoughts[suffix={closing}]: /(.|\\n)*/"
    else:
        rule = f"thoughts: /(.|\\n)*/ {closing}"
    lead = f"start: {thoughts} /\\n{{0,2}}/ @thought_out\n{rule}\n"
    first, *others = _parts(grammar)
    return json.dumps({"grammars": [{"lark_grammar": lead}, {**first, "name": "thought_out"}, *others]})


def or_calls(grammar: str, calls: CallGrammar, token_id: Callable[[str], int | None]) -> str:
    """A grammar in whose place tool calls may stand."""
    rule = re.sub(r"\{([<\[][^}]*[>\]])\}", lambda tag: _literal(tag[1], token_id), calls.rule)
    lead = {"lark_grammar": f"start: @answer | {rule}\n{calls.rules}\n"}
    parts = [{**_parts(part)[0], "name": name} for name, part in {"answer": grammar, **calls.parts}.items()]
    return json.dumps({"grammars": [lead, *parts]})


def _parts(grammar: str) -> list[dict[str, Any]]:
    return json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]


def _literal(tag: str, token_id: Callable[[str], int | None]) -> str:
    number = token_id(tag)
    return json.dumps(tag) if number is None else f"<[{number}]>"
