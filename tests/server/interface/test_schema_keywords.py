"""What a JSON schema says is held by its grammar, or refused by name where that is asked for, or left out."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from support import cpu_time

from octavo.interface.json_pattern import UnheldPatternError, translated
from octavo.interface.structured_output import StructuredOutputsParams, to_grammar

TOKENIZER = LLTokenizer("byte")
OBJECT = {"type": "object"}
TEXT = {"type": "string"}


def matcher_of(schema: Any, lenient: bool = False, closes: bool = False) -> LLMatcher:
    grammar = to_grammar(StructuredOutputsParams(json=json.dumps(schema)), lenient=lenient, strict=closes)
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def allows(matcher: LLMatcher, value: Any) -> bool:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    one = matcher.deep_copy()
    return all(one.consume_token(byte) for byte in text) and bool(one.is_accepting())


# A schema, values that it allows, and some that it does not: by JSON schema's own judgement, and by the grammar's.
HELD: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "anchor": ({"$ref": "#t", "$defs": {"x": {"$anchor": "t", **TEXT}}}, ["a"], [1]),
    "anchor inside": (
        {**OBJECT, "properties": {"a": {"$ref": "#t"}}, "$defs": {"x": {"$anchor": "t", **TEXT}}},
        [{"a": "b"}, {}],
        [{"a": 1}],
    ),
    "address": ({"$ref": "item.json", "$defs": {"x": {"$id": "item.json", **TEXT}}}, ["a"], [1]),
    "addresses": (
        {
            "$id": "http://x.test/a/root",
            "$ref": "b/item#/$defs/t",
            "$defs": {"x": {"$id": "b/item", "$defs": {"t": TEXT}}},
        },
        ["a"],
        [1],
    ),
    "anchor of a document": (
        {
            "$id": "http://x.test/root",
            "$ref": "item#t",
            "$defs": {"x": {"$id": "item", "$defs": {"y": {"$anchor": "t", **TEXT}}}},
        },
        ["a"],
        [1],
    ),
    "pointer inside a document": (
        {
            "$ref": "item",
            "$defs": {"x": {"$id": "item", "items": {"$ref": "#/$defs/t"}, "type": "array", "$defs": {"t": TEXT}}},
        },
        [["a"], []],
        [[1]],
    ),
    "escaped pointer": ({"$ref": "#/$defs/a~1b%25c~0", "$defs": {"a/b%c~": TEXT}}, ["a"], [1]),
    "names that look like references": (
        {**OBJECT, "properties": {"$ref": TEXT, "$anchor": {"const": "x"}}},
        [{"$ref": "#foo"}, {"$anchor": "x"}],
        [{"$ref": 1}],
    ),
    "data that looks like references": ({"enum": [{"$ref": "#foo"}]}, [{"$ref": "#foo"}], [{}]),
    "the root": (
        {**OBJECT, "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
        [{"a": {"a": {}}}],
        [{"a": {"b": 1}}],
    ),
    "dynamic reference": (
        {**OBJECT, "properties": {"a": {"$dynamicRef": "#t"}}, "$defs": {"x": {"$dynamicAnchor": "t", **TEXT}}},
        [{"a": "b"}],
        [{"a": 1}],
    ),
    "unevaluated": ({**OBJECT, "properties": {"a": TEXT}, "unevaluatedProperties": False}, [{"a": "b"}], [{"b": 1}]),
    "unevaluated with a schema": (
        {**OBJECT, "properties": {"a": TEXT}, "unevaluatedProperties": {"type": "integer"}},
        [{"a": "b", "c": 1}],
        [{"a": "b", "c": "d"}],
    ),
    "unevaluated beside allOf": (
        {**OBJECT, "allOf": [{"properties": {"a": TEXT}}], "unevaluatedProperties": False},
        [{"a": "b"}, {}],
        [{"b": 1}, {"a": "b", "c": 1}],
    ),
    "unevaluated beside $ref": (
        {
            "$ref": "#/$defs/x",
            "properties": {"b": TEXT},
            "unevaluatedProperties": False,
            "$defs": {"x": {**OBJECT, "properties": {"a": TEXT}}},
        },
        [{"a": "b"}, {"b": "c"}],
        [{"c": 1}],
    ),
    "unevaluated beside anyOf": (
        {
            **OBJECT,
            "unevaluatedProperties": False,
            "properties": {"k": TEXT},
            "anyOf": [
                {"properties": {"a": {"const": 1}}, "required": ["a"]},
                {"properties": {"b": {"const": 2}}, "required": ["b"]},
            ],
        },
        [{"k": "x", "a": 1}, {"b": 2}],
        [{"c": 1, "a": 1}, {"k": "x"}],
    ),
    "unevaluated where all are": (
        {**OBJECT, "additionalProperties": TEXT, "unevaluatedProperties": False},
        [{"z": "b"}],
        [{"z": 1}],
    ),
    "unevaluated items": ({"type": "array", "prefixItems": [TEXT], "unevaluatedItems": False}, [["a"], []], [["a", 1]]),
    "decimal counts": ({**TEXT, "minLength": 1.0, "maxLength": 2.0}, ["a", "ab"], ["", "abc"]),
    "what says nothing": ({**TEXT, "uniqueItems": False, "minContains": 2, "then": False, "not": False}, ["a"], [1]),
    "null for what is not set": ({**OBJECT, "properties": {"a": {"const": None}}, "required": None}, [{"a": None}], []),
    "slashes": ({**TEXT, "pattern": r"^a\/b\-\<c\>\@$"}, ["a/b-<c>@"], ["ab"]),
    "digits are ASCII's": ({**TEXT, "pattern": r"^[\d]\d$"}, ["12"], ["١٢"]),
    "words are ASCII's": ({**TEXT, "pattern": r"^\w[^\w]$"}, ["a-", "aé"], ["é-", "ab"]),
    "braces": ({**TEXT, "pattern": "^{a}]b{2}$"}, ["{a}]bb"], ["{a}]b"]),
    "classes": ({**TEXT, "pattern": r"^[[&&~a\]\b]$"}, ["[", "&", "~", "a", "]", "\b"], ["b", "\\"]),
    "letters by number": ({**TEXT, "pattern": r"^\x41\u0042\cJ$"}, ["AB\n"], ["AB"]),
    "beyond 16 bits": ({**TEXT, "pattern": r"^\ud83d\ude00$"}, ["😀"], ["a"]),
    "anchors of alternatives": ({**TEXT, "pattern": "^a$|^(?:b|c)$"}, ["a", "c"], ["ab"]),
    "names by pattern": (
        {**OBJECT, "patternProperties": {r"^x\/\d$": TEXT}, "additionalProperties": False},
        [{"x/1": "a"}],
        [{"x/1": 1}, {"y": "a"}],
    ),
}
# No schema, and what the judge's own expressions lack.
NOT_JUDGED = {"null for what is not set", "beyond 16 bits", "slashes", "braces", "classes"}


@pytest.mark.parametrize("name", HELD)
def test_keywords_that_grammars_express_are_enforced(name):
    schema, right, wrong = HELD[name]
    matcher = matcher_of(schema)
    for value in right:
        assert name in NOT_JUDGED or jsonschema_rs.is_valid(schema, value)
        assert allows(matcher, value), value
    for value in wrong:
        assert name in NOT_JUDGED or not jsonschema_rs.is_valid(schema, value)
        assert not allows(matcher, value), value


# Keywords that no grammar holds: a schema, what it is called, and a value that the rest of it allows.
UNHELD: dict[str, tuple[Any, str, Any]] = {
    "not": ({"not": TEXT}, "not", 1),
    "if": ({**OBJECT, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if", {}),
    "dependentRequired": ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "dependentRequired", {}),
    "dependentSchemas": ({**OBJECT, "dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas", {}),
    "dependencies": ({**OBJECT, "dependencies": {"a": ["b"]}}, "dependencies", {}),
    "propertyNames": ({**OBJECT, "propertyNames": {"maxLength": 2}}, "propertyNames", {"a": 1}),
    "contains": ({"type": "array", "contains": {"const": 1}, "minContains": 2}, "contains", [1, 1]),
    "uniqueItems": (
        {"type": "array", "items": {"properties": {"a": {"type": "array", "uniqueItems": True}}}},
        "items.properties.a.uniqueItems",
        [],
    ),
    "unevaluatedItems": (
        {"type": "array", "allOf": [{"prefixItems": [TEXT]}], "unevaluatedItems": False},
        "unevaluatedItems",
        ["a"],
    ),
    "dynamic reference": (
        {"$dynamicRef": "#t", "$defs": {"x": {"$dynamicAnchor": "t"}, "y": {"$dynamicAnchor": "t"}}},
        "$dynamicRef",
        1,
    ),
    "another document": ({"$ref": "http://x.test/schema"}, "$ref 'http://x.test/schema'", 1),
    "format": ({**TEXT, "format": "idn-email"}, "format 'idn-email'", "a"),
    "look-ahead": (
        {**OBJECT, "properties": {"a": {**TEXT, "pattern": "^(?!x)"}}},
        "properties.a.pattern has look-ahead",
        {"a": "b"},
    ),
    "look-behind": ({**TEXT, "pattern": "a(?<=a)"}, "pattern has look-behind", "a"),
    "back-reference": ({**TEXT, "pattern": r"^(a)\1$"}, "pattern has a back-reference", "aa"),
    "named back-reference": ({**TEXT, "pattern": r"^(?<x>a)\k<x>$"}, "pattern has a back-reference", "aa"),
    "word boundary": ({**TEXT, "pattern": r"\ba"}, "pattern has a word boundary", "a"),
    "anchor inside": ({**TEXT, "pattern": "(a$|b)c"}, "pattern has an anchor inside", "bc"),
    "names": (
        {**OBJECT, "patternProperties": {"^(?!x)": TEXT}, "additionalProperties": False},
        "patternProperties.^(?!x) has look-ahead",
        {"a": "b"},
    ),
}


@pytest.mark.parametrize("name", UNHELD)
def test_other_keywords_are_refused_by_name_if_strict_and_ignored_if_not(name):
    schema, says, value = UNHELD[name]
    with pytest.raises(ValueError, match=re.escape(says)):
        matcher_of(schema)
    for closes in (False, True):
        assert allows(matcher_of(schema, lenient=True, closes=closes), value)


def test_names_with_several_schemas_are_left_open_where_not_strict():
    schema = {**OBJECT, "patternProperties": {"a": {"type": "integer"}, "b": TEXT}, "additionalProperties": False}
    assert allows(matcher_of(schema, lenient=True), {"ab": 1})
    apart = {**OBJECT, "patternProperties": {"^a-": {"type": "integer"}, "^b-": TEXT}, "additionalProperties": False}
    assert allows(matcher_of(apart, lenient=True), {"a-x": 1}) and not allows(matcher_of(apart, lenient=True), {"c": 1})


@pytest.mark.parametrize("lenient", [True, False])
@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"$ref": "#/$defs/none"}, "$ref '#/$defs/none' leads to no part"),
        ({"$ref": "#none"}, "$ref '#none' leads to no part"),
        ({"pattern": "("}, "pattern is no regular expression: a group is not closed"),
        ({"pattern": "a)"}, "a group is closed that was not opened"),
        ({"pattern": "[a"}, "a class of letters is not closed"),
        ({"pattern": "a\\"}, "it ends with a backslash"),
        ({"pattern": "(?>a)"}, "a group of no known kind"),
        ({"$defs": True}, "$defs must be an object of schemas, got 'True'"),
        ({"$defs": [1]}, "$defs must be an object of schemas, got a value of type list"),
    ],
)
def test_a_value_that_is_no_schema_is_refused_by_name(lenient, schema, says):
    for root in ({**OBJECT, "properties": {"a": schema}}, schema):
        with pytest.raises(ValueError, match=re.escape(says)):
            matcher_of(root, lenient=lenient)


@pytest.mark.parametrize(
    ("place", "schema"),
    [
        ("/not", {"not": {"const": 5}}),
        ("/if/properties/b", {"if": {"properties": {"b": {"const": 5}}}, "then": {"$ref": "#/if"}}),
        ("/properties/c/contains", {"properties": {"c": {"type": "array", "contains": {"const": 5}}}}),
        ("/dependentSchemas/c", {"dependentSchemas": {"c": {"const": 5}}, "$defs": {"dependentSchemas.c": TEXT}}),
        ("/patternProperties/^%5Cd", {"patternProperties": {r"^\d": {"const": 5}}}),
        ("/additionalProperties", {"unevaluatedProperties": True, "additionalProperties": {"const": 5}}),
        ("/unevaluatedItems", {"unevaluatedItems": {"const": 5}, "$defs": None}),
        ("/not/items", {"not": {"items": {"const": 5, "not": {"$ref": "#/not/items"}}, "allOf": [{"$ref": "#/not"}]}}),
    ],
)
def test_a_part_stays_to_refer_to_where_its_keyword_is_left_out(place, schema):
    properties = {**schema.get("properties", {}), "a": {"$ref": f"#{place}"}}
    matcher = matcher_of({**OBJECT, **schema, "properties": properties}, lenient=True)
    assert allows(matcher, {"a": 5}) and not allows(matcher, {"a": 6})


def test_parts_that_are_referred_to_are_said_once():
    nested: Any = {"const": "x" * 1_000}
    for _ in range(50):
        nested = {"not": nested}
    names = ["/not" * depth for depth in range(1, 51)]
    schema = {**nested, "$defs": {str(i): {"$ref": f"#{name}"} for i, name in enumerate(names)}}
    grammar = to_grammar(StructuredOutputsParams(json=json.dumps(schema)), lenient=True)
    assert grammar.count("x" * 1_000) == 1


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.floats(-2, 2, width=16) | st.sampled_from(["", "a", "string"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "type"]), inner, max_size=2),
    max_leaves=3,
)
KEYWORDS = (
    "type",
    "properties",
    "required",
    "enum",
    "const",
    "items",
    "prefixItems",
    "additionalProperties",
    "anyOf",
    "oneOf",
    "patternProperties",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "multipleOf",
    "minLength",
    "maxItems",
    "allOf",
    "minProperties",
    "pattern",
    "format",
    "$ref",
    "$defs",
    "title",
    "default",
    "nullable",
    "$schema",
    "$id",
    "$anchor",
    "unknown",
    "not",
    "if",
    "contains",
    "uniqueItems",
    "unevaluatedProperties",
    "unevaluatedItems",
    "propertyNames",
)


@settings(max_examples=600, deadline=None)
@given(key=st.sampled_from(KEYWORDS), value=ANY)
def test_a_value_that_a_keyword_cannot_have_is_refused_by_the_keywords_name(key, value):
    """Never in the grammar engine's words, which name no place."""
    for root in ({key: value}, {**OBJECT, "properties": {"p": {key: value}}}):
        try:
            grammar = to_grammar(StructuredOutputsParams(json=json.dumps(root)), lenient=True)
        except ValueError as error:
            assert re.search(rf"{re.escape(key)}|type|additionalProperties|items", str(error)), error
        else:
            problem = LLMatcher(TOKENIZER, grammar, log_level=0).get_error()
            assert not problem or "Unsatisfiable" in problem, problem


PIECES = st.sampled_from(
    [
        *"ab01_-.é|()[]{}^$*+?,",
        r"\d",
        r"\w",
        r"\W",
        r"\.",
        r"\/",
        r"\-",
        r"\x61",
        r"\u0062",
        "[ab]",
        "[^a]",
        "(?:",
        "{1,2}",
    ]
)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of Python, on sets
@settings(max_examples=300, deadline=None)
@given(pattern=st.lists(PIECES, max_size=7).map("".join), texts=st.lists(st.text("ab01_-.é", max_size=3), max_size=4))
def test_texts_that_a_pattern_s_grammar_accepts_match_it(pattern, texts):
    """Python's reading, with ASCII's classes, is the judge: its differences to ECMA-262 are not drawn."""
    try:
        judge = re.compile(pattern, re.ASCII)
    except re.error:
        return
    if re.search(r"\$\)?[^|)]|\^\^|[*+?}][*+]|\$\$|,|\[.*\[", pattern):
        return
    try:
        matcher = matcher_of({**TEXT, "pattern": pattern})
    except (ValueError, AssertionError):
        return
    for text in texts:
        assert not allows(matcher, text) or judge.search(text), (pattern, translated(pattern), text)
        assert allows(matcher, text) or not judge.search(text), (pattern, translated(pattern), text)


def test_a_hostile_schema_takes_no_long_time():
    chain = {
        f"d{i}": {**OBJECT, "allOf": [{"$ref": f"#/$defs/d{i + 1}"}], "unevaluatedProperties": False}
        for i in range(2000)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": {**chain, "d2000": OBJECT}}
    with cpu_time.at_most(4):
        to_grammar(StructuredOutputsParams(json=json.dumps(schema)), lenient=True)
    with pytest.raises(UnheldPatternError):
        translated("(" * 500 + "a" + ")" * 500 + r"\1")
