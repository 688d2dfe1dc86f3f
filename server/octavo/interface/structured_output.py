"""Structured output: the user's JSON schema, regex, choices or grammar as a grammar for llguidance.

No torch here: the API process checks grammars before the engine sees them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from octavo.interface.json_schema import closed, sets_engine_options
from octavo.interface.schema_keywords import held, with_evaluated
from octavo.interface.schema_references import resolved

MAX_GRAMMAR_CHARS = 1_000_000
MAX_CHOICES = 10_000
_ESCAPED_ASCII = re.compile(r"\\u00([0-7][0-9a-fA-F])")  # in the JSON of a grammar's %json
# White space in JSON: what people and json.dumps write. Without a bound, small models fill their answers with it.
WHITE_SPACE = r"[ ]?|\n[ \t]{0,32}"


@dataclass
class StructuredOutputsParams:
    """Exactly one of: ``json`` (a JSON schema, as text or dict), ``json_object`` (any JSON object), ``regex``,
    ``choice`` (a list of texts), ``grammar`` (Lark, or GBNF as llama.cpp writes it)."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value is not None and value is not False]
        if len(given) != 1:
            raise ValueError(
                "structured_outputs must have exactly one of json, json_object, regex, choice, grammar; "
                f"got {', '.join(given) or 'none'}"
            )
        if self.choice is not None and not (
            isinstance(self.choice, list) and self.choice and all(isinstance(c, str) and c for c in self.choice)
        ):
            raise ValueError("structured_outputs.choice must be a list of at least one non-empty text")
        if self.choice is not None and len(self.choice) > MAX_CHOICES:
            count = len(self.choice)
            raise ValueError(f"structured_outputs.choice has {count} entries, at most {MAX_CHOICES} are allowed")

    @property
    def kind(self) -> str:
        """The name of the one that is set."""
        return next(name for name, value in vars(self).items() if value is not None and value is not False)


def to_grammar(params: StructuredOutputsParams, *, strict: bool = True, lenient: bool = False) -> str:
    """The grammar as llguidance's JSON text. Raises ValueError, naming the field, when there can be none.

    ``strict``: objects of a schema have no properties but those it names, where it does not say whether they may.
    ``lenient``: keywords of a schema that no grammar can hold are ignored, instead of refused. Whether llguidance can
    compile the grammar is found out by the engine, in a process that can be ended.
    """
    try:
        from llguidance import grammar_from
    except ImportError:
        raise ValueError("structured_outputs need the llguidance package: pip install 'octavo[server]'") from None
    kind = params.kind
    value = getattr(params, kind)
    try:
        if isinstance(value, str):
            _check_length(value)
        if kind == "json":
            grammar = _of_schema(json.loads(value) if isinstance(value, str) else value, strict, lenient)
        elif kind == "json_object":
            grammar = _of_schema({"type": "object"}, strict, lenient)
        elif kind == "choice":
            # One terminal: as alternatives of a rule, thousands of texts would be more than the parser takes.
            grammar = _of_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, value)))
        elif kind == "regex":
            grammar = grammar_from("regex", value)
        else:
            _check_options("x-guidance" in _ESCAPED_ASCII.sub(lambda found: chr(int(found[1], 16)), value))
            grammar = _of_lark(_as_lark(value))
        _check_length(grammar)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"structured_outputs.{kind} is not valid: {' '.join(str(error).split())[:500]}") from None
    return grammar


def _of_schema(schema: Any, strict: bool, lenient: bool) -> str:
    if not isinstance(schema, dict | bool):
        raise ValueError("a JSON schema is an object")
    _check_options(sets_engine_options(schema))
    schema = with_evaluated(resolved(schema))
    schema = held(closed(schema) if strict else schema, strict=not lenient)
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE, "lenient": lenient}}
    return json.dumps({"grammars": [{"json_schema": schema}]})


def _as_lark(text: str) -> str:
    """Lark as it is, GBNF in Lark's words. Raises ValueError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    # Its regular expression takes quadratic time over blank lines, and nothing else in the process runs meanwhile.
    if is_lark_syntax("\n".join(line for line in text.split("\n") if line.strip())):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:
        raise ValueError(f"it is neither Lark nor GBNF: {error}") from None


def _of_lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _check_options(given: bool) -> None:
    if given:
        raise ValueError('"x-guidance" sets options of the grammar engine, which are not for requests; remove it')


def _check_length(grammar: str) -> None:
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"it has {len(grammar)} characters, at most {MAX_GRAMMAR_CHARS} are allowed")
