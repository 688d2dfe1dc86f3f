"""Grammars of calls whose arguments stand between tags, as bare text. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from octavo.chat.structured import CallGrammar, TokenId, lark_of
from octavo.chat.tools.formats.row import Format, Params
from octavo.chat.tools.parsers.format_reader import header_parts
from octavo.chat.tools.parsers.values import kinds_of
from octavo.errors import FieldError
from octavo.interface.json_schema import moved

_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "description", "title", "$defs", "$schema"}
_OF_TEXTS = {"type", "enum", "const", "maxLength", "description", "title", "default", "examples"}
_WRITABLE = re.compile(r"[^<>\"\s=]+")


def parameters_of(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, which are always an object."""
    schema = function.get("parameters")
    if not schema:
        return {"type": "object", "additionalProperties": False}
    return schema if "type" in schema or "$ref" in schema else {"type": "object", **schema}


def keeps_schema(tags: Params, schema: dict[str, Any]) -> bool:
    """True if the grammar of these tags holds all that a tool's schema demands: what it does not know is in texts."""
    properties = schema.get("properties") or {}
    if not schema.keys() <= _OF_OBJECTS or schema.get("additionalProperties", False) is not False:
        return False
    if not (properties or schema.get("additionalProperties") is False):
        return False
    for key, value in properties.items():
        kinds = kinds_of(value, schema)
        if not _WRITABLE.fullmatch(key) or not isinstance(value, dict):
            return False
        if kinds == {"string"} and not value.keys() <= _OF_TEXTS:
            return False
        if kinds != {"string"} and not tags.kind_end and (not kinds or "string" in kinds):
            return False  # quotes around a text would be read as its own
    return True


def tagged_calls(
    row: Format, functions: list[dict[str, Any]], more: str, token_id: TokenId, grammar: Callable[[dict[str, Any]], str]
) -> CallGrammar:
    """Calls with the arguments in the order of the schema. ``more`` is "+" where several may follow one another.
    Raises FieldError for required arguments whose names cannot stand in a tag."""
    tags = row.arguments
    assert isinstance(tags, Params)
    newline = tags.newline
    rules: list[str] = []
    parts: dict[str, str] = {}
    names = []
    for i, function in enumerate(functions):
        schema = parameters_of(function)
        required = set(schema.get("required") or ())
        arguments = []
        for j, (key, value) in enumerate((schema.get("properties") or {}).items()):
            if not _WRITABLE.fullmatch(key):
                if key in required:
                    raise FieldError(
                        f"tools must have arguments with names of letters for this model, got {key!r}", "tools"
                    )
                continue
            named = f"{i}_{j}"
            lead, body = _value(tags, key, value, schema, named, token_id, grammar, rules, parts)
            rules.append(f"argument{named}: {lead} {body}")
            arguments.append(f"argument{named}" + ("" if key in required else "?"))
        begin = row.call + "".join(header_parts(row.header)).replace("{name}", function["name"])
        end = row.call_end
        if row.addressed:  # each section is a message of its own
            to = row.addressed.replace("{name}", function["name"])
            begin, end = f"{to}{row.section[0]}{newline}{begin}", f"{end}{newline}{row.section[1]}"
        opening = " /[0-9]{1,3}/ ".join(lark_of(part, token_id) for part in (begin + newline).split("{index}"))
        rules.append(f"call{i}: {opening} {' '.join(arguments)} {lark_of(end, token_id)}")
        names.append(f"call{i}")
    rules.append("call: " + " | ".join(names))
    begin, end = row.section
    if row.addressed:
        another = lark_of(f"{row.thoughts[1]}{row.texts[0]} ", token_id)
        following = f" ({another} call)*" if more else ""
        rule = f"(/ ?/ call{following})"
    elif row.exact and not begin:
        rule = f"(/\\n?/ call{_more(more, row.between, 'call')})"
    elif not begin:
        rule = f"(/\\n?/ call){more}"
    elif row.each and row.exact:
        one = f"{lark_of(begin + newline, token_id)} call {lark_of(newline + end, token_id)}"
        rule = f"(/\\n?/ {one}{_more(more, newline, one)})"
    elif row.each:
        opened, closed = lark_of(begin + newline, token_id), lark_of(newline + end, token_id)
        rule = f"(/\\n?/ {opened} call {closed}){more}"
    else:
        between = json.dumps(newline) if newline else ""  # by itself: texts that begin alike are not told apart
        following = f" ({between} call)*" if more else ""
        rule = f"(/\\n{{0,2}}/ {lark_of(begin, token_id)} {between} call{following} {between} {lark_of(end, token_id)})"
    return CallGrammar(rule, parts, "\n".join(rules))


def _more(more: str, between: str, call: str) -> str:
    """Lark for further calls, where there may be any."""
    return f" ({json.dumps(between) if between else ''} {call})*" if more else ""


def _value(
    tags: Params,
    key: str,
    value: Any,
    schema: dict[str, Any],
    named: str,
    token_id: TokenId,
    grammar: Callable[[dict[str, Any]], str],
    rules: list[str],
    parts: dict[str, str],
) -> tuple[str, str]:
    """Lark for what stands in front of a value, and for it with its end."""
    kinds = kinds_of(value, schema)
    is_text = kinds == {"string"}
    key_end = tags.key_end + (_kind(tags, kinds) + tags.kind_end if tags.kind_end else "")
    trimmed = "\n" if tags.trims else ""
    lead = lark_of(tags.key + key + key_end + tags.value + trimmed, token_id)
    end = lark_of(trimmed + tags.value_end + tags.newline, token_id)
    if not is_text:
        definitions = {"tool": moved(schema, "#/$defs/tool")}
        step = key.replace("~", "~0").replace("/", "~1")
        parts[f"value{named}"] = grammar({"$ref": f"#/$defs/tool/properties/{step}", "$defs": definitions})
        return lead, f"@value{named} {end}"
    options = [value["const"]] if "const" in value else value.get("enum")
    if isinstance(options, list):
        return lead, f"({' | '.join(json.dumps(option, ensure_ascii=False) for option in options)}) {end}"
    most = value.get("maxLength")
    length = f"{{0,{most}}}" if isinstance(most, int) else "*"
    closing = lark_of(tags.value_end, token_id)
    if closing.startswith("<["):  # a text never holds a token
        rules.append(f"text{named}: /(.|\\n){length}/ {closing}")
    else:
        rules.append(f"text{named}[suffix={json.dumps(trimmed + tags.value_end)}]: /(.|\\n){length}/")
    after = lark_of(tags.newline, token_id)
    return lead, f"text{named} {after}"


def _kind(tags: Params, kinds: set[str]) -> str:
    """The word for a value's kind."""
    if kinds == {"string"}:
        return tags.text_kind
    if tags.text_kind == "true":
        return "false"
    return min(kinds - {"null", "string"}, default="object").replace("integer", "number")
