"""The grammars of demanded calls: references follow, and what a tool does not name is not invented."""

from __future__ import annotations

import copy
import json

import pytest
from llguidance import LLMatcher

from octavo.chat.messages import Conversation
from octavo.chat.options import ChatOptions
from octavo.chat.tools.plan import ToolPlan, plan_tools
from octavo.interface.structured_output import to_grammar

NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}, "all": {"$ref": "#"}},
    "$defs": {"node": {"type": "object", "properties": {"value": {"$ref": "#/properties/value"}}}},
}


def plan_for(*parameters: dict | None, **fields) -> ToolPlan:
    tools = [
        {"type": "function", "function": {"name": f"f{i}"} | ({} if schema is None else {"parameters": schema})}
        for i, schema in enumerate(parameters)
    ]
    conversation = Conversation([], tools, **{"tool_choice": "required", **fields})
    made = plan_tools(conversation, ChatOptions(), "")
    assert made is not None
    return made


def schema_of(made: ToolPlan) -> dict:
    assert made.constraint is not None and isinstance(made.constraint.params.json, str)
    assert not LLMatcher.validate_grammar(to_grammar(made.constraint.params)), "the grammar compiles"
    return json.loads(made.constraint.params.json)


def test_references_into_a_tools_schema_follow_it():
    original = copy.deepcopy(NODE)
    schema = schema_of(plan_for(NODE, {"type": "object"}, None))
    moved = schema["$defs"]["tool0"]
    assert moved["properties"]["next"] == {"$ref": "#/$defs/tool0/$defs/node"}
    assert moved["properties"]["all"] == {"$ref": "#/$defs/tool0"}
    assert moved["$defs"]["node"]["properties"]["value"] == {"$ref": "#/$defs/tool0/properties/value"}
    assert original == NODE, "the client's schema is left as it is"


def test_data_in_a_tools_schema_is_no_schema():
    data = {"$ref": "#/abc", "properties": {"a": {}}}
    schema = {"type": "object", "properties": {"x": {"const": data}, "y": {"enum": [data]}, "z": {"default": data}}}
    moved = schema_of(plan_for(schema))["$defs"]["tool0"]["properties"]
    assert moved == schema["properties"]


def test_the_standards_reading_of_tools_schemas():
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}
    function = {"name": "f", "parameters": schema}
    conversation = Conversation(
        [], [{"type": "function", "function": function}], {"type": "function", "function": {"name": "f"}}
    )
    made = plan_tools(conversation, ChatOptions(strict_json_schema=False), "")
    assert made is not None and schema_of(made) == schema


def test_one_call_when_parallel_calls_are_off():
    assert schema_of(plan_for(NODE, parallel_tool_calls=False))["maxItems"] == 1
    assert "maxItems" not in schema_of(plan_for(NODE))


def named(schema: dict | None) -> dict:
    return schema_of(plan_for(schema, tool_choice={"type": "function", "function": {"name": "f0"}}))


def test_unnamed_arguments_are_closed_out_where_nothing_is_said():
    inner = {"type": "object", "properties": {"b": {}}, "default": {"properties": {}}}
    closed = named({"type": "object", "properties": {"a": inner}, "required": ["a"]})
    assert closed["additionalProperties"] is False and closed["properties"]["a"]["additionalProperties"] is False
    assert closed["properties"]["a"]["default"] == {"properties": {}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        {"type": "object", "properties": {"a": {}}, "required": ["b"]},
        {"type": "object", "properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}, {"properties": {"c": {}}}]},
        {"allOf": [{"$ref": "#/$defs/x"}, {"properties": {"b": {}}}], "$defs": {"x": {"properties": {"a": {}}}}},
    ],
)
def test_schemas_that_say_more_stay_open(schema):
    assert json.dumps(named(schema)).count('"additionalProperties": false') == 0


def test_a_tool_without_parameters_takes_none():
    assert named(None)["additionalProperties"] is False
