"""Coding agents: the requests that they send, replayed. Each is answered, or refused by a sentence that names a field.

Field by field as their sources and logs show them, with shorter texts and fewer tools.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.folded import streamed

ZONE = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
STRICT_ZONE = {"$schema": "http://json-schema.org/draft-07/schema#", **ZONE, "additionalProperties": False}
COMMAND = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
    "required": ["command"],
    "additionalProperties": False,
}
FUNCTIONS = [
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": ZONE}},
    {"type": "function", "function": {"name": "bash", "description": "Runs it.", "parameters": COMMAND}},
]
EPHEMERAL = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SYSTEM = {"role": "system", "content": "You are a coding agent."}
USER = {
    "role": "user",
    "content": [{"type": "text", "text": "<environment_details>"}, {"type": "text", "text": "[call]"}],
}
CALLED = [
    {"role": "user", "content": "list the files"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I list them.",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "a.py"},
]

CLAUDE_CODE = {
    "model": "scripted",
    "max_tokens": 64_000,
    "stream": True,
    "temperature": 0,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.280.0d9; cc_entrypoint=cli; cch=fa690;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral", "scope": "global"}},
        {"type": "text", "text": "# Tone", **EPHEMERAL},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nx\n</system-reminder>"},
                {"type": "text", "text": "go on"},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I search.", "signature": "EqQB"},
                {"type": "redacted_thinking", "data": "EmwK"},
                {
                    "type": "tool_use",
                    "id": "toolu_1",
                    "name": "ToolSearch",
                    "input": {"query": "select:now"},
                    "caller": {"type": "direct"},
                },
                {"type": "tool_use", "id": "toolu_2", "name": "Bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "tool_reference", "tool_name": "now"}],
                },
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": "<tool_use_error>no</tool_use_error>",
                    "is_error": True,
                },
                {"type": "text", "text": "then?"},
            ],
        },
        {"role": "system", "content": [{"type": "text", "text": "# Environment [call]", **EPHEMERAL}]},
    ],
    "tools": [
        {"name": "Bash", "description": "Runs it.", "input_schema": COMMAND, "eager_input_streaming": True},
        {"name": "ToolSearch", "description": "Finds tools.", "input_schema": ZONE, **EPHEMERAL},
        {
            "name": "now",
            "description": "The time.",
            "input_schema": STRICT_ZONE,
            "defer_loading": True,
            "input_examples": [{"zone": "UTC"}],
            "allowed_callers": ["direct"],
        },
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": '{"device_id":"b4","account_uuid":"","session_id":"fe"}'},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "diagnostics": {"previous_message_id": None},
}
CODEX = {
    "model": "scripted",
    "instructions": "You are Codex.",
    "temperature": 0,
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>"}]},
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "Hm."}],
            "content": None,
            "encrypted_content": "gAAAA",
        },
        {
            "type": "message",
            "role": "assistant",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "I list them."}],
        },
        {"type": "function_call", "name": "shell_command", "arguments": '{"command":"ls"}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "Exit code: 0\nOutput:\na.py"},
        {"type": "custom_tool_call", "status": "completed", "call_id": "call_2", "name": "apply_patch", "input": "**"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Done"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "[call]"}]},
    ],
    "tools": [
        {"type": "function", "name": "shell_command", "description": "Runs", "strict": False, "parameters": COMMAND},
        {"type": "function", "name": "now", "description": "The time.", "strict": False, "parameters": STRICT_ZONE},
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
        },
        {"type": "web_search", "external_web_access": False, "search_content_types": ["text", "image"]},
        {"type": "image_generation", "output_format": "png"},
        {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": ZONE},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "service_tier": "priority",
    "prompt_cache_key": "019a",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "1"},
}
AGENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Claude Code": ("messages", CLAUDE_CODE),
    "Codex": ("responses", CODEX),
    "Codex, tools in the input": (
        "responses",
        {
            **CODEX,
            "tools": [],
            "input": [
                {
                    "type": "additional_tools",
                    "role": "developer",
                    "tools": [
                        {"type": "namespace", "name": "functions", "description": "Tools.", "tools": CODEX["tools"][:3]}
                    ],
                },
                *CODEX["input"],
            ],
        },
    ),
    "opencode": (
        "chat",
        {
            "model": "scripted",
            "max_tokens": 500,
            "temperature": 0,
            "top_p": 1,
            "messages": [SYSTEM, *CALLED, USER],
            "tools": FUNCTIONS,
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "Cline": (
        "chat",
        {
            "model": "scripted",
            "temperature": 0,
            "messages": [SYSTEM, *CALLED, USER],
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": FUNCTIONS,
            "tool_choice": "auto",
            "parallel_tool_calls": False,
        },
    ),
    "Cline by Ollama": (
        "ollama",
        {
            "model": "scripted",
            "stream": True,
            "options": {"num_ctx": 32_768, "temperature": 0},
            "tools": FUNCTIONS,
            "messages": [SYSTEM, {"role": "user", "content": "<environment_details>\n[call]", "images": []}],
        },
    ),
    "goose": (
        "chat",
        {
            "model": "scripted",
            "messages": [{**SYSTEM, "role": "developer"}, *CALLED, USER],
            "tools": FUNCTIONS,
            "temperature": 0.0,
            "max_completion_tokens": 500,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "Zed": (
        "chat",
        {
            "model": "scripted",
            "messages": [SYSTEM, *CALLED, USER],
            "stream": True,
            "temperature": 0.0,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 500,
            "tools": FUNCTIONS,
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "prompt_cache_key": "thread-1",
            "reasoning_effort": "medium",
        },
    ),
    "Zed by Ollama": (
        "ollama",
        {
            "model": "scripted",
            "stream": True,
            "keep_alive": -1,
            "think": True,
            "messages": [
                SYSTEM,
                {"role": "user", "content": "list the files"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "bash", "arguments": {"command": "ls"}}}],
                    "thinking": None,
                },
                {"role": "tool", "tool_name": "bash", "content": "a.py"},
                {"role": "user", "content": "[call]"},
            ],
            "options": {"num_ctx": 16_384, "num_predict": None, "stop": [], "temperature": 0.0, "top_p": None},
            "tools": FUNCTIONS,
        },
    ),
    "Continue by Ollama": (
        "ollama",
        {
            "model": "scripted",
            "raw": False,
            "keep_alive": 1800,
            "stream": True,
            "options": {"num_predict": 500, "num_ctx": 8192, "temperature": 0, "num_thread": 4, "stop": ["<|im_end|>"]},
            "messages": [SYSTEM, {"role": "user", "content": "[call]"}],
            "tools": FUNCTIONS,
        },
    ),
    "Copilot": (
        "chat",
        {
            "model": "scripted",
            "messages": [SYSTEM, *CALLED, {**USER, "name": "me"}],
            "temperature": 0,
            "top_p": 1,
            "n": 1,
            "stream": True,
            "tools": FUNCTIONS,
            "stream_options": {"include_usage": True},
        },
    ),
    "Copilot by Responses": (
        "responses",
        {
            "model": "scripted",
            "temperature": 0,
            "top_p": 1,
            "stream": True,
            "store": True,
            "truncation": "disabled",
            "max_output_tokens": 500,
            "reasoning": {"effort": "medium", "summary": "detailed"},
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "a:b",
            "input": [
                {"role": "system", "content": [{"type": "input_text", "text": "You are a coding agent."}]},
                {"role": "user", "content": [{"type": "input_text", "text": "[call]"}]},
            ],
            "tools": [{"type": "function", "name": "now", "description": "", "parameters": ZONE, "strict": False}],
        },
    ),
}


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agents_request_is_answered_by_a_call(scripted, agent):
    dialect, body = AGENTS[agent]
    reasoning, text, calls, _ = streamed(scripted.url, dialect, body)
    assert calls in ([("now", '{"zone": "UTC"}')], [("now", {"zone": "UTC"})])
    assert text.strip() == "Let me look."
    assert reasoning.strip() == "I need the time."


def test_claude_codes_headers_and_token_counts_are_accepted(scripted):
    headers = {
        "anthropic-version": "2023-06-01",
        "x-app": "cli",
        "user-agent": "claude-cli/2.1.280 (external, cli)",
        "anthropic-beta": "claude-code-20250219,context-management-2025-06-27,effort-2025-11-24",
        "x-api-key": "none",
    }
    counted = {key: CLAUDE_CODE[key] for key in ("model", "messages", "tools")}
    count = scripted.post("/v1/messages/count_tokens?beta=true", counted, headers=headers)
    assert count.status_code == 200 and count.json()["input_tokens"] > 0
    title = {
        "type": "object",
        "properties": {"title": {"type": "boolean"}},
        "required": ["title"],
        "additionalProperties": False,
    }
    body = {
        **CLAUDE_CODE,
        "tools": [],
        "thinking": {"type": "disabled"},
        "context_management": None,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "stream": False,
        "output_config": {"format": {"type": "json_schema", "schema": title}},
        "max_tokens": 200,
    }
    answer = scripted.post("/v1/messages?beta=true", body, headers=headers)
    assert answer.status_code == 200 and '"title"' in answer.json()["content"][0]["text"]
    probe = scripted.post(
        "/v1/messages",
        {
            "model": "scripted",
            "max_tokens": 1,
            "messages": [{"role": "user", "content": "quota"}],
            "metadata": {"user_id": "x"},
        },
        headers=headers,
    )
    assert probe.json()["usage"]["output_tokens"] == 1
    assert scripted.get("/v1/models?limit=1000", headers=headers).json()["data"][0]["type"] == "model"


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "tools.0": ("/v1/responses", {**CODEX, "tools": [{"type": "local_shell"}]}),
    "input.0": (
        "/v1/responses",
        {
            **CODEX,
            "input": [{"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}}],
        },
    ),
    "context_management": (
        "/v1/responses",
        {**AGENTS["Copilot by Responses"][1], "context_management": [{"type": "compaction", "compact_threshold": 9}]},
    ),
    "messages.0.content": (
        "/v1/messages",
        {
            **CLAUDE_CODE,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
                    ],
                }
            ],
        },
    ),
    "messages.1.content": (
        "/v1/chat/completions",
        {
            "messages": [
                SYSTEM,
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}],
                },
            ]
        },
    ),
    "suffix": ("/api/generate", {"model": "scripted", "prompt": "def f(", "suffix": "return 1", "raw": True}),
    "functions": ("/v1/chat/completions", {"messages": [SYSTEM], "functions": [FUNCTIONS[0]["function"]]}),
}


@pytest.mark.parametrize("field", REFUSED)
def test_unsupported_fields_of_agents_are_named(scripted, field):
    path, body = REFUSED[field]
    answer = scripted.post(path, body)
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert answer.status_code == 400 and field in message and "\n" not in message, message
