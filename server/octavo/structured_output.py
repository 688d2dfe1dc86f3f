"""Structured output: what a user may ask for, as the one grammar form that the engine runs (llguidance's).

No torch here: the API process checks grammars before the engine sees them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MAX_GRAMMAR_CHARS = 1_000_000
MAX_CHOICES = 10_000
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


def to_grammar(params: StructuredOutputsParams) -> str:
    """The grammar as llguidance's JSON text. Raises ValueError, naming the field, when it is not a valid one.

    Bounded by llguidance's own limits on grammar size and lexer work: milliseconds, for hostile input too.
    """
    try:
        from llguidance import LLMatcher, grammar_from
    except ImportError:
        raise ValueError("structured_outputs need the llguidance package: pip install 'octavo[server]'") from None
    field = next(name for name, value in vars(params).items() if value is not None and value is not False)
    value = getattr(params, field)
    try:
        if field == "json":
            text = value if isinstance(value, str) else json.dumps(value)
            schema = json.loads(text)
            if not isinstance(schema, (dict, bool)):
                raise ValueError("a JSON schema is an object")
            grammar = grammar_from("json_schema", _with_white_space(schema))
        elif field == "json_object":
            grammar = grammar_from("json_schema", _with_white_space({"type": "object"}))
        elif field == "choice":
            grammar = grammar_from("choice", json.dumps(value))
        else:
            grammar = grammar_from("regex" if field == "regex" else "grammar", value)
        problem = _too_long(grammar) or LLMatcher.validate_grammar(grammar)
    except (ValueError, TypeError, RecursionError) as error:
        problem = str(error)
    if problem and not problem.startswith("WARNING"):
        raise ValueError(f"structured_outputs.{field} is not valid: {' '.join(problem.split())[:500]}")
    return grammar


def _with_white_space(schema: dict[str, Any] | bool) -> str:
    """The schema as text; its own "x-guidance", llguidance's options, goes before ours."""
    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else None
    if isinstance(options, dict):
        schema = {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE, **options}}  # type: ignore[dict-item]
    return json.dumps(schema)


def _too_long(grammar: str) -> str | None:
    if len(grammar) > MAX_GRAMMAR_CHARS:
        return f"it has {len(grammar)} characters, at most {MAX_GRAMMAR_CHARS} are allowed"
    return None
