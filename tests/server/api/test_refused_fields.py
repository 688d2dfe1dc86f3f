"""What will not be built is refused by its name, with the way out, and never ignored."""

from __future__ import annotations

from typing import Any

import pytest

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": CHAT,
}
SOUND = {"voice": "alloy", "format": "wav"}
# By route: a field's value, and the sentence that tells what to do instead.
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "/v1/chat/completions": [
        ({"web_search_options": {"search_context_size": "low"}}, "use tools, with one of yours that searches"),
        ({"audio": SOUND}, "drop it"),
        ({"modalities": ["text", "audio"]}, 'use ["text"]'),
        ({"logits_processors": ["my.Processor"]}, "use logit_bias, bad_words, allowed_token_ids or structured_outputs"),
        ({"custom_logit_processor": "pickle"}, "use logit_bias, bad_words, allowed_token_ids or structured_outputs"),
        ({"moderation": {"model": "x"}}, "use /v1/decisions"),
        ({"thread": {"id": "t"}}, "use messages, with the whole conversation"),
        ({"functions": [{"name": "f"}]}, "use tools"),
        ({"mirostat": 2}, "drop it"),
        ({"typical_p": 0.5}, "drop it"),
    ],
    "/v1/completions": [
        ({"logits_processors": ["my.Processor"]}, "use logit_bias, bad_words, allowed_token_ids or structured_outputs"),
        ({"prediction": {"type": "content", "content": "x"}}, "use /v1/chat/completions"),
        ({"verbosity": "low"}, "drop it"),
        ({"thread": {"id": "t"}}, "use prompt, with the whole conversation"),
    ],
    "/v1/responses": [
        ({"moderation": {"model": "x"}}, "use /v1/decisions"),
        ({"prompt": {"id": "pmpt_1"}}, "use instructions and input"),
        ({"context_management": [{"type": "compaction"}]}, "use truncation"),
        ({"thread": {"id": "t"}}, "use previous_response_id or conversation"),
    ],
    "/v1/messages": [
        ({"thread": {"id": "t"}}, "use messages, with the whole conversation"),
        ({"mcp_servers": [{"type": "url", "url": "https://x.example"}]}, "drop it"),
        ({"container": "c"}, "drop it"),
        ({"speed": "fast"}, "drop it"),
    ],
}


@pytest.mark.parametrize(
    ("path", "given", "way_out"),
    [(path, given, words) for path, fields in REFUSED.items() for given, words in fields],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_refusal_names_the_field_and_the_way_out(shared_server, path, given, way_out):
    (name,) = given
    answer = shared_server.post(path, {**BODIES[path], **given})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["message"] == f"{name} is not supported by this server: {way_out}"
    assert error.get("param", name) == name


def test_a_compaction_is_refused_by_its_place(shared_server):
    edits = {"context_management": {"edits": [{"type": "compact_20260112"}]}}
    answer = shared_server.post("/v1/messages", {**CHAT, **edits})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and "context_management.edits.0" in message and "clear_tool_uses" in message


def test_sound_is_refused_in_messages_too(shared_server):
    part = {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}
    answer = shared_server.post("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": [part]}]})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "messages.0.content.0.type"
    assert "no model reads audio here" in error["message"]
