"""No schema makes a grammar of calls larger than llguidance takes: what would is made as JSON, or may be any value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from octavo.chat.structured import CallGrammar, joined, with_tokens
from octavo.chat.tools.formats.row import Format, Gaps, Python
from octavo.chat.tools.formats.table import TOOL_FORMATS
from octavo.chat.tools.grammars import call_grammar, keeps_schemas
from octavo.chat.tools.python_grammar import PythonValues
from octavo.chat.tools.value_grammar import typed_calls
from octavo.chat.tools.value_sizes import MAX_LARK, size_of_arguments, size_of_value

TOKENIZER = LLTokenizer("byte")
IN_PYTHON = replace(TOOL_FORMATS["seed_oss"], gaps=Gaps(python=True))  # lists and objects between tags
ROWS = {"lfm2": TOOL_FORMATS["lfm2"], "gemma4": TOOL_FORMATS["gemma4"], "seed_oss": IN_PYTHON}


def nested(levels: int, optional: int) -> dict[str, Any]:
    """An object of optional properties, of which the last is such an object."""
    inner = nested(levels - 1, optional) if levels > 1 else {"type": "integer"}
    properties = {f"p{at}": {"type": "integer"} for at in range(optional - 1)} | {"q": inner}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def no_token(text: str) -> int | None:
    return None


def lark(made: CallGrammar) -> str:
    return f"start: {with_tokens(made.rule, no_token)}\n{made.rules}\n"


def accepted(made: CallGrammar, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, joined(lark(made), made.parts))
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


WRITTEN = {
    "lfm2": '<|tool_call_start|>[f(q={{"more": 1}}), now(x=1)]<|tool_call_end|>',
    "gemma4": "<|tool_call>call:f{{q:{{more:1}}}}<tool_call|><|tool_call>call:now{{x:1}}<tool_call|>",
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_objects_inside_of_objects_do_not_make_a_grammar_too_large(row: Format) -> None:
    small = {"name": "now", "parameters": nested(1, 2)}
    made = call_grammar(row, [{"name": "f", "parameters": nested(7, 10)}, small], None, no_token)
    assert len(lark(made)) < MAX_LARK
    assert not LLMatcher(TOKENIZER, joined(lark(made), made.parts)).is_error()
    assert keeps_schemas(row, [small])


@pytest.mark.parametrize("name", ["lfm2", "gemma4"])
def test_a_tool_whose_grammar_is_too_large_takes_any_arguments_and_others_their_own(name: str) -> None:
    row, large = ROWS[name], {"name": "f", "parameters": nested(7, 10)}
    assert not keeps_schemas(row, [large]), "its demanded calls are JSON"
    text = WRITTEN[name].replace("{{", "{").replace("}}", "}")
    own = [{"name": "now", "parameters": nested(1, 2)}]
    assert not accepted(call_grammar(row, [large, *own], None, no_token), text)
    assert accepted(call_grammar(row, [large, *own], None, no_token), text.replace("x", "q"))


@pytest.mark.parametrize("name", ["lfm2", "gemma4"])
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_llguidance_takes_what_there_is_room_for(name: str, levels: int) -> None:
    row, largest = ROWS[name], None
    for optional in range(2, 120):
        function = {"name": "f", "parameters": nested(levels, optional)}
        if not keeps_schemas(row, [function]):
            break
        largest = function
    assert largest is not None
    made = call_grammar(row, [largest], None, no_token)
    assert MAX_LARK / 8 < len(lark(made)) < MAX_LARK
    assert not LLMatcher(TOKENIZER, joined(lark(made), made.parts)).is_error()


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6)
keys = st.sampled_from(["a", "b", "a1", "long_name", "x-y", "'\"\\"])
kinds = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])
schemas = st.recursive(
    st.fixed_dictionaries({}, optional={"type": kinds | st.lists(kinds, max_size=3), "minimum": st.integers()})
    | st.fixed_dictionaries({"enum": st.lists(scalars | st.lists(scalars, max_size=1), max_size=3)})
    | st.fixed_dictionaries({"const": scalars}),
    lambda inner: (
        st.fixed_dictionaries({"type": st.just("array")}, optional={"items": inner})
        | st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)}, optional={"type": kinds})
        | st.fixed_dictionaries(
            {"properties": st.dictionaries(keys, inner, max_size=4)},
            optional={"type": st.just("object"), "required": st.lists(st.sampled_from(["a", "b"]), max_size=2)},
        )
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(schemas)
def test_a_grammar_is_no_longer_than_is_told_before(schema: dict[str, Any]) -> None:
    written = PythonValues(schema, TOOL_FORMATS["lfm2"]).value(schema)
    assert len(written) <= size_of_value(Python(), schema, schema)
    row, parameters = ROWS["gemma4"], {"type": "object", "properties": {"v": schema}}
    for token_id in (no_token, lambda _: 1_234_567):
        rule = typed_calls(row, [{"name": "f", "parameters": parameters}], token_id).rules[-1]
        assert len(rule.removeprefix("arguments0: ")) <= size_of_arguments(row.arguments, parameters)


def test_a_kind_that_is_named_again_and_again_costs_nothing() -> None:
    schema = nested(5, 2)
    inner = schema
    while "properties" in inner:
        inner["type"] = ["object"] * 10
        inner = inner["properties"]["q"]
    assert keeps_schemas(ROWS["lfm2"], [{"name": "f", "parameters": {"properties": {"a": schema}}}])
