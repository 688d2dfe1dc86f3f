"""Constraints on the form of generated text, and grammars that combine them with reasoning and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from octavo.chat.thought_tags import THINK
from octavo.errors import FieldError
from octavo.interface.structured_output import StructuredOutputsParams, to_grammar
from octavo.text.shown import shown

TokenId = Callable[[str], int | None]

# Texts in formats of calls and thoughts that may be tokens of a vocabulary.
MARKS = re.compile(r"(<[^<>\s]*>|｜DSML｜|\[/?[A-Z_]+\]|\]<\]minimax\[>\[)")

ANY_BREAKS = r"/\n{0,4}/"  # Lark for line breaks of which nothing is known


@dataclass
class Constraint:
    """The form that the output must have, and the field in which the client asked for it."""

    params: StructuredOutputsParams
    field: str
    lenient: bool = False  # ignore schema keywords that no grammar can express, instead of refusing them
    allows_calls: bool = False  # the output may be tool calls instead

    def grammar(self, strict: bool) -> str:
        """The grammar; ``strict`` as for `to_grammar`. Raises FieldError naming the client's field."""
        try:
            return to_grammar(self.params, strict=strict, lenient=self.lenient)
        except ValueError as error:
            raise _named(error, self.field) from None


@dataclass
class CallGrammar:
    """A grammar of tool calls in a model's own format."""

    rule: str  # Lark for all calls of an output, with special tokens as {<token>} or {[TOKEN]}
    parts: dict[str, str]  # by name, the grammars that the rule refers to as @name
    rules: str = ""  # further Lark that it refers to


def _named(error: ValueError, field: str) -> Exception:
    """An error about structured_outputs.<kind>, with the client's field instead."""
    subject, _, rest = str(error).partition(" ")
    return FieldError(f"{field} {rest}", field) if subject.startswith("structured_outputs") else error


def make_constraint(field: str, **kind: Any) -> Constraint:
    """A constraint of one kind of StructuredOutputsParams. Raises FieldError naming ``field``."""
    try:
        return Constraint(StructuredOutputsParams(**kind), field)
    except ValueError as error:
        raise _named(error, field) from None


def schema_constraint(value: Any, field: str) -> Constraint:
    """The constraint of an object with ``schema`` and ``strict``. Raises FieldError naming ``field``."""
    if not isinstance(value, dict):
        raise FieldError(f'{field} must be an object with "name" and "schema", got {shown(value)}', field)
    schema, strict = value.get("schema"), value.get("strict")
    if not isinstance(schema, dict | bool):
        raise FieldError(f"{field}.schema must be a JSON schema, got {shown(schema)}", f"{field}.schema")
    if strict is not None and not isinstance(strict, bool):
        raise FieldError(f"{field}.strict must be true or false, got {shown(strict)}", f"{field}.strict")
    constraint = make_constraint(f"{field}.schema", json=json.dumps(schema))
    constraint.lenient = not strict
    return constraint


def after_reasoning(grammar: str, inside: bool, token_id: TokenId, tags: tuple[str, str] = THINK.around) -> str:
    """A grammar with optional reasoning before its text, required if the prompt ends inside it (``inside``).

    ``token_id`` gives the id of a text that is one token of the vocabulary, else None. ``tags`` are around reasoning.
    """
    opening, closing = (lark_of(tag, token_id) for tag in tags)
    thoughts = rf"({opening})? thoughts" if inside else rf"(/\n{{0,2}}/ {opening} thoughts)?"
    if not closing.startswith("<["):
        rule = f"thoughts[suffix={json.dumps(tags[1])}]: /(.|\\n)*/"
    else:
        rule = f"thoughts: /(.|\\n)*/ {closing}"
    lead = f"start: {thoughts} /\\n{{0,2}}/ @thought_out\n{rule}\n"
    first, *others = grammar_parts(grammar)
    return json.dumps({"grammars": [{"lark_grammar": lead}, {**first, "name": "thought_out"}, *others]})


@dataclass(frozen=True)
class Frame:
    """The texts that a template writes around the thoughts of an answer that is calls; None where it does not tell."""

    lead: str | None = None  # between a prompt and calls, where there are no thoughts
    thoughts: tuple[str, str] | None = None  # between a prompt and thoughts; between these and calls


def after_frame(
    calls: CallGrammar, frame: Frame, may_reason: bool, inside: bool, token_id: TokenId, tags: tuple[str, str] | None
) -> str:
    """The grammar of an answer that is calls: thoughts, where there may be any, and what stands around them.
    ``inside``, ``tags``: as for `after_reasoning`."""
    rule = with_tokens(calls.rule, token_id)
    lead = ANY_BREAKS if frame.lead is None else lark_of(frame.lead, token_id)
    if tags is None or not may_reason:
        return _joined(f"{lead} {rule}", calls, {})
    begin, end = frame.thoughts or ("", tags[1])
    gap = begin.rpartition(tags[0])[2]
    closing_gap, _, behind = end.partition(tags[1])
    opening = lark_of(begin.removesuffix(gap), token_id)
    if frame.thoughts is None:
        opening = f"({lark_of(tags[0], token_id)})?" if inside else f"{ANY_BREAKS} {lark_of(tags[0], token_id)}"
    after = ANY_BREAKS if frame.thoughts is None else lark_of(behind, token_id)
    thoughts = f"{opening} thoughts {after}"
    return _joined(
        f"{thoughts} {rule}" if inside else f"({thoughts} | {lead}) {rule}",
        replace(calls, rules=f"{calls.rules}\n{_thoughts(gap, closing_gap, tags[1], token_id)}"),
        {},
    )


def _thoughts(gap: str, closing_gap: str, tag: str, token_id: TokenId) -> str:
    """The rule of thoughts with the gaps inside their tags, and their end. Of a tag that is no token, the gap in front
    cannot be told from thoughts."""
    closing = lark_of(tag, token_id)
    before, behind = (re.escape(text).replace("\\\n", "\\n") for text in (gap, closing_gap))
    if closing.startswith("<["):  # thoughts hold no token
        return rf"thoughts: /{before}(.|\n)*{behind}/ {closing}"
    return rf"thoughts[suffix={json.dumps(tag)}]: /{before}(.|\n)*/"


def or_calls(grammar: str, calls: CallGrammar, token_id: Callable[[str], int | None]) -> str:
    """A grammar that allows tool calls instead of its text."""
    rule = with_tokens(calls.rule, token_id)
    return _joined(f"@answer | {rule}", calls, {"answer": grammar})


def _joined(start: str, calls: CallGrammar, others: dict[str, str]) -> str:
    return joined(f"start: {start}\n{calls.rules}\n", {**others, **calls.parts})


def joined(lark: str, parts: dict[str, str], free: dict[str, Any] | None = None) -> str:
    """A grammar with those to which it refers by their names. ``free``: see `octavo.worker.grammars.free_text`."""
    others = [{**grammar_parts(part)[0], "name": name} for name, part in parts.items()]
    return json.dumps({"grammars": [{"lark_grammar": lark}, *others]} | ({"free": free} if free else {}))


def lark_of(text: str, token_id: TokenId) -> str:
    """Lark for a text in which some marks may be tokens of the vocabulary; "" for none."""
    parts: list[str] = []
    plain = ""
    for part in MARKS.split(text):
        number = token_id(part) if MARKS.fullmatch(part) else None
        if number is None:
            plain += part
            continue
        parts += [json.dumps(plain, ensure_ascii=False)] if plain else []
        parts.append(f"<[{number}]>")
        plain = ""
    parts += [json.dumps(plain, ensure_ascii=False)] if plain else []
    return " ".join(parts)


def with_tokens(lark: str, token_id: Callable[[str], int | None]) -> str:
    """Lark with {<token>} and {[TOKEN]} as special tokens, or as texts where the vocabulary has none."""
    return re.sub(r"\{([<\[][^}]*[>\]])\}", lambda tag: _literal(tag[1], token_id), lark)


def quoted(text: str) -> str:
    """A text in Lark, in which `with_tokens` finds no token."""
    return json.dumps(text).replace("{", "\\u007b")


def grammar_parts(grammar: str) -> list[dict[str, Any]]:
    """The grammars of which one consists, its own first."""
    return json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]


def _literal(tag: str, token_id: Callable[[str], int | None]) -> str:
    number = token_id(tag)
    return json.dumps(tag) if number is None else f"<[{number}]>"
