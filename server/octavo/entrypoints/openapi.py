"""/openapi.json: every operation with the schemas of its body and responses, and with this server's limits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema

from octavo.entrypoints.generation.pooled import MAX_INPUTS
from octavo.entrypoints.openai.protocol import MAX_PROMPTS
from octavo.entrypoints.operation import Operation
from octavo.entrypoints.state import ServerState
from octavo.interface.pooling import PoolerConfig
from octavo.version import __version__

_REF = "#/components/schemas/"
# Each is enough: OpenAI's way, Anthropic's and Azure's.
_KEYS = {
    "apiKey": {"type": "http", "scheme": "bearer"},
    "apiKeyHeader": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    "azureKeyHeader": {"type": "apiKey", "in": "header", "name": "Api-Key"},
}
_IN_PATH = re.compile(r"\{(\w+)")  # a parameter's name
# Under which heading an operation stands: that of the first of these with which its path begins.
_HEADINGS = {
    "/v1/messages": "Anthropic",
    "/api/": "Ollama, llama.cpp",
    "/props": "Ollama, llama.cpp",
    "/v1/files": "OpenAI: batches",
    "/v1/batches": "OpenAI: batches",
    "/v1/responses": "OpenAI: responses",
    "/v1/conversations": "OpenAI: responses",
    **dict.fromkeys(
        ("/v1/embed", "/v2/", "/v1/rerank", "/rerank", "/v1/score", "/score", "/classify"), "Vectors, scores"
    ),
    "/v1/": "OpenAI",
    "/": "This server",
}


def document(operations: Sequence[Operation], state: ServerState, title: str, root_path: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    bodies = [operation.body for operation in operations if operation.body is not None]
    _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF + "{model}")
    answers = [operation.answer for operation in operations if not isinstance(operation.answer, str)]
    errors = {operation.error: None for operation in operations}
    _, components = msgspec.json.schema_components([*answers, *errors], ref_template=_REF + "{name}")
    schemas = {**definitions.get("$defs", {}), **components}
    assert len(schemas) == len(definitions.get("$defs", {})) + len(components), "a body and an answer of one name"
    assert all("." not in name for name in components), "two answers of one name"
    for body in bodies:
        _state_limits(schemas[body.__name__], state, getattr(body, "CLAMPED", frozenset()))
    paths: dict[str, Any] = {}
    for operation in operations:
        described = _describe(operation, bool(state.args.api_key))
        paths.setdefault(operation.path.replace(":path}", "}"), {})[operation.method.lower()] = described
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "tags": [{"name": name} for name in ("OpenAI", *sorted({*_HEADINGS.values()} - {"OpenAI"}))],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": _KEYS,
        },
    }
    if root_path:
        result["servers"] = [{"url": root_path}]
    return result


def _describe(operation: Operation, has_keys: bool) -> dict[str, Any]:
    if isinstance(operation.answer, str):
        content: dict[str, Any] = {operation.answer: {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": {"$ref": _REF + operation.answer.__name__}}}
    if operation.streams:
        chunk: dict[str, Any] = {"type": "string", "description": "one chunk as JSON, or [DONE]"}
        schema: dict[str, Any] = {"type": "object", "properties": {"data": chunk}}
        content[operation.streams] = {"schema": schema if operation.streams == "text/event-stream" else {}}
    error = {"application/json": {"schema": {"$ref": _REF + operation.error.__name__}}}
    described: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.summary,
        "tags": [next(heading for begin, heading in _HEADINGS.items() if operation.path.startswith(begin))],
        "responses": {
            "200": {"description": "Success", "content": content},
            "4XX": {"description": "The request is invalid or refused", "content": error},
            "5XX": {"description": "The server failed, or admits no requests now", "content": error},
        },
    }
    if operation.body is not None:
        schema = {"$ref": _REF + operation.body.__name__}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if operation.form is not None:
        described["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": operation.form}}}
    for name in _IN_PATH.findall(operation.path):
        parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        described.setdefault("parameters", []).append(parameter)
    for name, schema in (operation.query or {}).items():
        described.setdefault("parameters", []).append({"name": name, "in": "query", "schema": schema})
    if has_keys and not operation.open:
        described["security"] = [{scheme: []} for scheme in _KEYS]
    return described


def _state_limits(schema: dict[str, Any], state: ServerState, clamped: frozenset[str]) -> None:
    """Add what depends on the server: model names, vocabulary, max_model_len (not to the fields ``clamped`` to it)."""
    properties = schema["properties"]
    config = state.engine.config
    vocab_size, longest = config.model.vocab_size, config.scheduler.max_model_len - 1
    token = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    if "model" in properties:
        models = [*state.model_names, *(served.adapter.name for served in state.adapters.all())]
        properties["model"] = {"anyOf": [{"enum": models}, {"type": "null"}], "default": None}
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "tokens"):
        for option in _options(properties, name, "array"):
            option["items"] = token
    # No maxItems: beside truncate_prompt_tokens a prompt may be longer.
    ids = {"items": token, "description": f"at most {longest} tokens, unless truncate_prompt_tokens is given"}
    for name, most in (("prompt", MAX_PROMPTS), ("input", MAX_INPUTS)):
        for option in _options(properties, name, "array"):
            _limit_prompts(option, ids, most)
    for option in _options(properties, "logit_bias", "object"):
        (value,) = option["patternProperties"].values()
        option["patternProperties"] = {f"^{integers_below(vocab_size)}$": value}
        option["additionalProperties"] = False
    names = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "truncate_prompt_tokens")
    maxima = {"n": state.max_n, **dict.fromkeys(names, longest)}
    maxima |= dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), state.args.max_logprobs)
    for name, maximum in ((name, maxima[name]) for name in maxima.keys() - clamped):
        for option in _options(properties, name, "integer"):
            option["maximum"] = maximum
    _limit_vectors(properties, config.model.pooler, config.model.pooler.width(config.model.hidden_size))
    if not state.args.trust_request_chat_template and "chat_template" in properties:
        properties["chat_template"] = {"type": "null"}


def _limit_vectors(properties: dict[str, Any], pooler: PoolerConfig, size: int) -> None:
    """Limit vectors to the lengths that they can be cut to, of ``size`` numbers, and texts to the model's prompts."""
    for option in (
        *_options(properties, "dimensions", "integer"),
        *_options(properties, "output_dimension", "integer"),
    ):
        if pooler.dimensions == ():
            option["maximum"] = size
        else:
            option["enum"] = sorted({size, *(one for one in pooler.dimensions or () if one <= size)})
    for option in _options(properties, "prompt_name", "string"):
        option["enum"] = list(pooler.prompts)
    if "prompt_name" in properties and not pooler.prompts:
        properties |= {name: {"type": "null"} for name in ("prompt_name", "input_type")}


def _options(properties: dict[str, Any], name: str, kind: str) -> Iterator[dict[str, Any]]:
    """The parts of a property's schema for one type."""
    described = properties.get(name, {})
    return (option for option in described.get("anyOf", [described]) if option.get("type") == kind)


def _limit_prompts(option: dict[str, Any], ids: dict[str, Any], most: int) -> None:
    """Limit one prompt's token ids, or the number of prompts. Items of other fields of the name have no limit here."""
    items = option["items"]
    if "type" not in items:
        return
    if items["type"] == "integer":
        option |= ids
    else:
        option["maxItems"] = most
    if items["type"] == "array":
        items |= ids


def integers_below(limit: int) -> str:
    """A regular expression of the integers 0 to ``limit`` - 1 as JSON writes them, inside parentheses."""
    digits = str(limit)
    options = [f"[1-9][0-9]{{{length - 1}}}" for length in range(2, len(digits))] + (["[0-9]"] if limit > 9 else [])
    for at, digit in enumerate(digits):
        lowest = 1 if at == 0 and len(digits) > 1 else 0
        if int(digit) > lowest:
            rest = len(digits) - at - 1
            options.append(f"{digits[:at]}[{lowest}-{int(digit) - 1}][0-9]{{{rest}}}")
    return f"({'|'.join(options)})"
