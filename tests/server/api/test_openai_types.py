"""Every answer and every streamed chunk fits OpenAI's published types: those that its package carries, made from its
OpenAPI document, checked strictly and as JSON Schema too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from functools import cache
from typing import Any

import httpx
import jsonschema_rs
import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter, ValidationError
from support import sdk_types

import octavo
from octavo.engine.args import EngineArgs
from octavo.entrypoints.state import system_fingerprint

USER = [{"role": "user", "content": "Hello"}]
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two answers": {"n": 2, "seed": 1},
    "log-probabilities": {"logprobs": True, "top_logprobs": 2},
    "stopped": {"stop": ["e", "a", "o"], "max_tokens": 60},
    "a form": {"response_format": {"type": "json_object"}, "max_tokens": 30},
    "a call": {"tools": [NOW], "tool_choice": "required", "max_tokens": 60},
    "one of the allowed calls": {
        "tools": [NOW],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOW]}},
    },
    "a prediction": {"prediction": {"type": "content", "content": "Hello"}, "n": 2},
    "vLLM's extras": {"return_token_ids": True, "prompt_logprobs": 1},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several prompts": {"prompt": ["a", "b"], "n": 2},
    "log-probabilities": {"logprobs": 2},
    "echo": {"echo": True},
}


# vLLM's fields beside OpenAI's: in every object, in every chunk, of a model
EXTRAS = ("stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs", "kv_transfer_params", "reasoning")
EXTRAS += ("reasoning_content",)
OF_COMPLETIONS = (*EXTRAS, "service_tier")
OF_CHUNKS = ("stop_reason",)
ASKED = (*OF_CHUNKS, "token_ids", "prompt_token_ids")
# What vLLM 0.33 and OpenAI have in every object, null or not.
ALWAYS = {
    "chat": {
        "id",
        "object",
        "created",
        "model",
        "choices",
        "service_tier",
        "system_fingerprint",
        "usage",
        "prompt_logprobs",
        "prompt_token_ids",
        "kv_transfer_params",
    },
    "choice": {"index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids"},
    "message": {"role", "content", "refusal", "annotations", "audio", "function_call", "reasoning"},
    "completion": {
        "id",
        "object",
        "created",
        "model",
        "choices",
        "service_tier",
        "system_fingerprint",
        "usage",
        "kv_transfer_params",
    },
    "text": {
        "index",
        "text",
        "logprobs",
        "finish_reason",
        "stop_reason",
        "token_ids",
        "prompt_logprobs",
        "prompt_token_ids",
    },
}
OF_MODELS = ("root", "parent", "max_model_len", "default_sampling_params", "input_modalities", "tool_format")


@cache
def schema_of(kind: Any) -> Any:
    return jsonschema_rs.validator_for(TypeAdapter(kind).json_schema())


def fits(kind: Any, raw: str, extras: Collection[str] = EXTRAS) -> None:
    sdk_types.fits(kind, raw, extras)
    schema_of(kind).validate(json.loads(raw))


def test_the_check_finds_a_field_too_few_and_one_too_many(shared_server):
    """In every object of an answer."""
    body = {"messages": USER, "max_tokens": 2, "ignore_eos": True, "logprobs": True, "top_logprobs": 1}
    answer = shared_server.post("/v1/chat/completions", body).json()
    kept = json.dumps(answer)
    objects = [answer, answer["choices"][0], answer["choices"][0]["message"], answer["usage"]]
    objects += [answer["choices"][0]["logprobs"]["content"][1], answer["usage"]["prompt_tokens_details"]]
    for one in objects:
        one["zzz"] = None
        with pytest.raises(AssertionError, match="zzz"):
            fits(ChatCompletion, json.dumps(answer))
        del one["zzz"]
    for key in ("id", "choices", "created", "model", "object"):
        with pytest.raises(ValidationError, match=key):
            fits(ChatCompletion, json.dumps({name: value for name, value in answer.items() if name != key}))
    assert json.dumps(answer) == kept


def chunks(server, path: str, body: dict[str, Any]) -> list[str]:
    with httpx.stream("POST", server.url + path, json={**body, "stream": True}, timeout=90) as response:
        assert response.status_code == 200, response.read()
        events = response.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(event.startswith("data: ") for event in events[:-1])
    return [event.removeprefix("data: ") for event in events[:-2]]


@pytest.mark.parametrize("name", CHATS)
def test_chats(shared_server, name):
    body = {"model": "tiny", "messages": USER, "max_tokens": 6, **CHATS[name]}
    extras = ASKED if name == "vLLM's extras" else OF_CHUNKS
    answer = shared_server.post("/v1/chat/completions", body)
    fits(ChatCompletion, answer.text)
    assert ALWAYS["chat"] <= answer.json().keys()
    for choice in answer.json()["choices"]:
        assert ALWAYS["choice"] <= choice.keys() and ALWAYS["message"] <= choice["message"].keys()
    if body.pop("prompt_logprobs", None) is not None:  # a stream of a chat has no place for them
        refused = shared_server.post("/v1/chat/completions", {**body, "prompt_logprobs": 1, "stream": True})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"
    for options in ({}, {"stream_options": {"include_usage": True}}):
        found = chunks(shared_server, "/v1/chat/completions", {**body, **options})
        for chunk in found:
            fits(ChatCompletionChunk, chunk, extras)
        assert len(found) >= 2


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions(shared_server, name):
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 6, **COMPLETIONS[name]}
    answer = shared_server.post("/v1/completions", body)
    fits(Completion, answer.text, OF_COMPLETIONS)
    assert ALWAYS["completion"] <= answer.json().keys()
    assert all(ALWAYS["text"] <= choice.keys() for choice in answer.json()["choices"])
    for chunk in chunks(shared_server, "/v1/completions", {**body, "stream_options": {"include_usage": True}}):
        value = json.loads(chunk)
        for choice in value["choices"]:
            # OpenAI's own chunks say null while an answer goes on, which its types leave out.
            assert choice["finish_reason"] in (None, "stop", "length")
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        fits(Completion, json.dumps(value), OF_CHUNKS)


def test_one_fingerprint_in_every_answer_and_chunk(shared_server, tiny_model, tmp_path):
    """Of the version, the model and how it is computed, wherever the files lie and however many are served at once."""
    found = set()
    for path, body in (("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": "Hello"})):
        body |= {"max_tokens": 2}
        found.add(shared_server.post(path, body).json()["system_fingerprint"])
        found |= {json.loads(chunk)["system_fingerprint"] for chunk in chunks(shared_server, path, body)}
    (one,) = found
    assert one.startswith(f"octavo-{octavo.__version__}-")

    def of(folder, **options: Any) -> str:
        return system_fingerprint(EngineArgs(str(folder), load_format="dummy", **options).create_engine_config())

    elsewhere = shutil.copytree(tiny_model, tmp_path / "elsewhere")
    assert of(tiny_model) == of(elsewhere) == of(tiny_model, max_num_seqs=2, gpu_memory_utilization=0.5) == one
    assert of(tiny_model, dtype="bfloat16") != one != of(tiny_model, kv_cache_dtype="int8")
    (elsewhere / "config.json").write_text((elsewhere / "config.json").read_text().replace("10000.0", "20000.0"))
    assert of(elsewhere) != one


def test_embeddings_and_models(shared_server):
    body = {"model": "tiny", "input": ["a", "b"]}
    fits(CreateEmbeddingResponse, shared_server.post("/v1/embeddings", body).text, ())
    listed = shared_server.get("/v1/models").json()
    assert listed["object"] == "list" and listed["data"]
    for model in listed["data"]:
        fits(Model, json.dumps(model), OF_MODELS)
    fits(Model, shared_server.get("/v1/models/tiny").text, OF_MODELS)
