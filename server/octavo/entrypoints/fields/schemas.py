"""JSON schemas of the fields that are checked by hand, since pydantic's errors for unions of objects are unreadable.

The checks are in generation/messages.py, generation/tools/plan.py and response_format.py; a test (test_fields.py)
compares both.
"""

from __future__ import annotations

from typing import Any

from octavo.chat.messages import MAX_MESSAGES, ROLES
from octavo.chat.tools.plan import MAX_TOOL_NAME, MAX_TOOLS
from octavo.text.chat_template import RESERVED
from octavo.text.messages import REASONING

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}

# messages

_PART: Schema = {
    "anyOf": [
        {
            "type": "object",
            "required": ["type", "text"],
            "properties": {"type": {"enum": ["text", "input_text", "output_text"]}, "text": _TEXT},
        },
        {
            "type": "object",
            "required": ["type", "refusal"],
            "properties": {"type": {"const": "refusal"}, "refusal": _TEXT},
        },
        _TEXT,
    ]
}
_CONTENT: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _PART}]}
_TOOL_CALL: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": _TEXT,
                "arguments": {"type": ["string", "object", "null"], "description": "a JSON object, mostly as text"},
            },
        }
    },
}
_NAMES: Schema = {"name": _TEXT_OR_NULL, "tool_call_id": _TEXT_OR_NULL}
MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "items": {
        "anyOf": [
            {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "role": {"enum": [role for role in ROLES if role != "assistant"]},
                    "content": _CONTENT,
                    "tool_calls": {"type": "null"},
                    **_NAMES,
                },
            },
            {
                "type": "object",
                "required": ["role"],
                "properties": {
                    "role": {"const": "assistant"},
                    "content": {"anyOf": [*_CONTENT["anyOf"], {"type": "null"}]},
                    "refusal": _TEXT_OR_NULL,
                    **dict.fromkeys(REASONING, _TEXT_OR_NULL),
                    "tool_calls": {"anyOf": [{"type": "array", "items": _TOOL_CALL}, {"type": "null"}]},
                    **_NAMES,
                },
            },
        ]
    },
}

TEMPLATE_VARIABLES: Schema = {
    "anyOf": [{"type": "object", "propertyNames": {"not": {"enum": sorted(RESERVED)}}}, {"type": "null"}]
}

# tools

_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_TOOL_NAME}
TOOL: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": _NAME,
                "description": _TEXT_OR_NULL,
                "parameters": {"type": ["object", "null"], "description": "a JSON schema"},
                "strict": {"type": ["boolean", "null"]},
            },
        },
    },
}
_REFERENCE: Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": {"name": _TEXT}},
    },
}
TOOLS: Schema = {"anyOf": [{"type": "array", "items": TOOL, "maxItems": MAX_TOOLS}, {"type": "null"}]}
TOOL_CHOICE: Schema = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        _REFERENCE,
        {
            "type": "object",
            "required": ["type", "allowed_tools"],
            "properties": {
                "type": {"const": "allowed_tools"},
                "allowed_tools": {
                    "type": "object",
                    "required": ["mode", "tools"],
                    "properties": {
                        "mode": {"enum": ["auto", "required"]},
                        "tools": {"type": "array", "items": _REFERENCE, "minItems": 1},
                    },
                },
            },
        },
    ]
}

# The form of the answer

_JSON_SCHEMA: Schema = {"type": ["object", "boolean"], "description": "a JSON schema"}
RESPONSE_FORMAT: Schema = {
    "anyOf": [
        {"type": "object", "required": ["type"], "properties": {"type": {"const": "text"}}},
        {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"const": "json_object"}, "schema": {"anyOf": [_JSON_SCHEMA, {"type": "null"}]}},
        },
        {
            "type": "object",
            "required": ["type", "json_schema"],
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "required": ["schema"],
                    "properties": {"schema": _JSON_SCHEMA, "strict": {"type": ["boolean", "null"]}},
                },
            },
        },
        {"type": "null"},
    ]
}
# By the kinds of StructuredOutputsParams.
KINDS: dict[str, Schema] = {
    "json": {"type": ["object", "string"], "description": "a JSON schema"},
    "json_object": {"const": True},
    "regex": {"type": "string", "description": "a regular expression"},
    "choice": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 10_000},
    "grammar": {"type": "string", "description": "a grammar, as Lark or GBNF"},
}
WITHOUT_EFFECT = ("disable_fallback", "_backend", "backend")
STRUCTURED_OUTPUTS: Schema = {
    "anyOf": [
        *(
            {
                "type": "object",
                "required": [kind],
                "properties": {kind: schema, **{name: {} for name in WITHOUT_EFFECT}},
                "additionalProperties": {"enum": [None, False]},
            }
            for kind, schema in KINDS.items()
        ),
        {"type": "null"},
    ]
}


def or_null(kind: str) -> Schema:
    """The schema of a constraint of this kind, or null."""
    return {"anyOf": [KINDS[kind], {"type": "null"}]}
