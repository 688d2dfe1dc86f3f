"""Schemas that say nothing on further properties allow none, and no answer that keeps to the named ones is lost."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from support import cpu_time

from octavo.interface.json_schema import closed, moved
from octavo.interface.structured_output import StructuredOutputsParams, to_grammar

NAMES = ["a", "b", "c", "$ref", "const"]
REFERENCES = st.sampled_from(["#/$defs/x", "#/$defs/y"]).map(lambda where: {"$ref": where})
LEAVES = st.sampled_from([{"type": "integer"}, {"type": "string"}, {}, {"const": 1}, {"enum": [{"properties": {}}]}])


def objects(parts: st.SearchStrategy[Any], referring: bool = True) -> st.SearchStrategy[Any]:
    some = st.lists(parts, min_size=1, max_size=2)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.just("object"),
            "properties": st.dictionaries(st.sampled_from(NAMES), parts, max_size=3),
            "patternProperties": st.dictionaries(st.sampled_from(["^b", "c$"]), parts, max_size=1),
            "additionalProperties": st.one_of(st.booleans(), parts),
            "required": st.lists(st.sampled_from(NAMES), unique=True, max_size=2),
            "minProperties": st.integers(0, 2),
            "allOf": some,
            "anyOf": some,
            "oneOf": some,
            "if": parts,
            "then": parts,
            "not": parts,
            **({"$ref": REFERENCES.map(lambda reference: reference["$ref"])} if referring else {}),
        },
    )


PARTS = st.recursive(st.one_of(LEAVES, REFERENCES), objects, max_leaves=8)
DEFINITIONS = st.one_of(LEAVES, objects(LEAVES, referring=False))  # not each other: a circle holds for nothing
NAMING = st.builds(
    lambda names: {"properties": {name: {} for name in names}}, st.lists(st.sampled_from(NAMES), min_size=1, max_size=2)
)
TOGETHER = st.builds(
    lambda own, parts: {**own, "allOf": parts},
    st.one_of(NAMING, REFERENCES, st.just({})),
    st.lists(st.one_of(NAMING, REFERENCES, NAMING.map(lambda one: {"allOf": [one]})), min_size=1, max_size=2),
)
SCHEMAS = st.builds(
    lambda schema, x, y: {**schema, "$defs": {"x": x, "y": y}},
    st.one_of(objects(PARTS), TOGETHER, TOGETHER.map(lambda schema: {"properties": {"a": schema}})),
    st.one_of(NAMING, DEFINITIONS),
    st.one_of(NAMING, DEFINITIONS),
)
VALUES = st.recursive(
    st.one_of(st.integers(0, 2), st.just("text")),
    lambda inner: st.dictionaries(st.sampled_from([*NAMES, "z"]), inner, max_size=3),
    max_leaves=6,
)


def only_named(value: Any, schema: Any, root: Any) -> Any:
    """The value without properties that no schema for its place names."""
    holding = list(holding_for(schema, root))
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, one in value.items():
        parts = [s["properties"][name] for s in holding if name in s.get("properties", {})]
        parts += [
            part
            for s in holding
            for pattern, part in s.get("patternProperties", {}).items()
            if (name.startswith("b") if pattern == "^b" else name.endswith("c"))
        ]
        for part in parts:
            one = only_named(one, part, root)
        if parts:
            kept[name] = one
    return kept


def holding_for(schema: Any, root: Any) -> list[dict[str, Any]]:
    if not isinstance(schema, dict):
        return []
    inner = [*schema.get("allOf", ()), *schema.get("anyOf", ()), *schema.get("oneOf", ())]
    inner += [schema[key] for key in ("if", "then") if key in schema]
    if "$ref" in schema:
        inner.append(root["$defs"][schema["$ref"][-1]])
    return [schema, *(one for part in inner for one in holding_for(part, root))]


@settings(max_examples=300, deadline=None)
@given(SCHEMAS, VALUES)
def test_closed_schemas_allow_less_and_all_that_is_named(schema: Any, value: Any) -> None:
    before = copy.deepcopy(schema)
    tight = closed(schema)
    assert schema == before, "the caller's schema is left as it is"
    assert closed(tight) == tight
    for one in (value, only_named(value, schema, schema)):
        if jsonschema_rs.is_valid(tight, one) and not negates(schema):
            assert jsonschema_rs.is_valid(schema, one)
    one = only_named(value, schema, schema)
    if one == only_named(one, schema, schema) and jsonschema_rs.is_valid(schema, one) and not chooses(schema):
        assert jsonschema_rs.is_valid(tight, one)


def negates(schema: Any) -> bool:
    """Whether a tighter part can make the whole looser."""
    return any(f'"{key}"' in json.dumps(schema) for key in ("not", "if", "oneOf"))


def chooses(schema: Any) -> bool:
    """Whether a value may mix what is named by alternatives."""
    return any(f'"{key}"' in json.dumps(schema) for key in ("anyOf", "oneOf", "if"))


SILENT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/b"}}, "required": ["a"]}
SILENT["$defs"] = {"b": {"type": "object", "properties": {"c": {"type": "boolean"}}}}
TOKENIZER = LLTokenizer("byte")


def accepts(schema: Any, text: str, strict: bool) -> bool:
    matcher = LLMatcher(TOKENIZER, to_grammar(StructuredOutputsParams(json=schema), strict=strict, lenient=True))
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "named", "more"),
    [
        (SILENT, '{"a": 1, "b": {"c": true}}', '{"a": 1, "x": 1}'),
        (SILENT, '{"a": 1, "b": {}}', '{"a": 1, "b": {"x": 1}}'),
        ({"anyOf": [SILENT["$defs"]["b"], {"type": "null"}]}, '{"c": true}', '{"x": 1}'),
        ({"type": "array", "items": SILENT["$defs"]["b"]}, '[{"c": true}]', '[{"x": 1}]'),
        ({"patternProperties": {"^x": {"type": "integer"}}, "type": "object"}, '{"x1": 1}', '{"y": 1}'),
        ({"allOf": [SILENT["$defs"]["b"]]}, '{"c": true}', '{"x": 1}'),
    ],
)
def test_grammars_allow_what_is_not_named_only_where_the_standards_reading_is_asked_for(schema, named, more):
    assert accepts(schema, named, strict=True) and accepts(schema, named, strict=False)
    assert not accepts(schema, more, strict=True) and accepts(schema, more, strict=False)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object"}, '{"x": [1]}'),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, '{"x": 1}'),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}}, '{"x": 1}'),
        (
            {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {}}}], "type": "object"},
            '{"a": 1, "b": 2}',
        ),
        ({"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"b": 1}'),
    ],
)
def test_a_schema_s_own_keywords_stay(schema, text):
    assert accepts(schema, text, strict=True)


def test_json_object_is_free():
    matcher = LLMatcher(TOKENIZER, to_grammar(StructuredOutputsParams(json_object=True)))
    assert all(matcher.consume_token(byte) for byte in b'{"any": {"thing": [1]}}') and matcher.is_accepting()


def test_data_is_not_moved_and_properties_of_any_name_are():
    data = {
        "const": {"$ref": "#/a"},
        "enum": [{"$ref": "#/a"}],
        "default": {"$ref": "#/a"},
        "examples": [{"$ref": "#"}],
    }
    schema = {"properties": {**data, "x": data}, "items": {"$ref": "#"}}
    copied = moved(schema, "#/$defs/t")
    assert copied["properties"]["x"] == data
    assert copied["properties"]["const"] == {"$ref": "#/$defs/t/a"}
    assert copied["items"] == {"$ref": "#/$defs/t"}


@pytest.mark.parametrize("blank", ["\n", " \n", "\n\t"])
def test_blank_lines_of_a_grammar_take_no_time(blank: str) -> None:
    """Less than a megabyte of them held up all threads of a server for an hour."""
    for head, tail in (('root ::= "a"', '\nb ::= "c"'), ('x: "a"', "\nstart: x")):
        with cpu_time.at_most(3):
            to_grammar(StructuredOutputsParams(grammar=head + blank * 40_000 + tail))
