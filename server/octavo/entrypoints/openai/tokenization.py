"""POST /tokenize and /detokenize: vLLM's routes for clients that count tokens."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import ConfigDict, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from octavo.chat.messages import Conversation
from octavo.entrypoints.dialect import read_request
from octavo.entrypoints.errors import bad_request
from octavo.entrypoints.fields import schemas
from octavo.entrypoints.fields.unsupported import DETOKENIZE, TOKENIZE, UnsupportedFields
from octavo.entrypoints.fields.values import (
    IMAGES,
    MessagesField,
    ModelBody,
    ReasoningEffort,
    TemplateVariables,
    TokenIds,
)
from octavo.entrypoints.generation.chat import count_prompt, read_messages
from octavo.entrypoints.generation.run import PromptOptions
from octavo.entrypoints.tenants import combined_salt
from octavo.entrypoints.transport.responses import JSON

_CHAT_FIELDS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "tools",
    "tool_choice",
)


class TokenizeRequest(ModelBody):
    """A ``prompt``, or ``messages`` with the options of the chat template."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = TOKENIZE

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {
                    "required": ["prompt"],
                    "properties": {"prompt": {"type": "string"}, **{name: {"type": "null"} for name in _CHAT_FIELDS}},
                },
                {"required": ["messages"], "properties": {"messages": {"type": "array"}}},
            ]
        }
    )

    prompt: str | None = None
    messages: MessagesField | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: TemplateVariables = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    tools: Annotated[list[dict[str, Any]] | None, WithJsonSchema(schemas.TOOLS)] = None
    tool_choice: Annotated[Any, WithJsonSchema(schemas.TOOL_CHOICE)] = None
    return_token_strs: bool | None = None


class DetokenizeRequest(ModelBody):
    """Token ids."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = DETOKENIZE

    tokens: TokenIds


class TokenizeResponse(msgspec.Struct):
    """Token ids and, if asked for, their strings."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeResponse(msgspec.Struct):
    """The text."""

    prompt: str


async def tokenize(request: Request) -> Response:
    """Handle POST /tokenize."""
    checked = await read_request(request, TokenizeRequest, IMAGES)
    state, body = checked.state, checked.body
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("exactly one of prompt and messages must be given", "prompt")
    for name in _CHAT_FIELDS if body.messages is None else ():
        if getattr(body, name) is not None:
            raise bad_request(f"{name} needs messages: send them instead of prompt, or drop it", name)
    processor = state.engine.input_processor
    if body.messages is not None:
        messages = await read_messages(state, body.messages)
        conversation = Conversation(messages, **{name: getattr(body, name) for name in _CHAT_FIELDS})
        options = PromptOptions(add_special_tokens=bool(body.add_special_tokens)).for_tenant
        ids = await count_prompt(state, conversation, options)
    else:
        special = body.add_special_tokens is not False
        salt = combined_salt(None)
        ids = await state.engine.run_in_thread(processor.tokenize, body.prompt, special, None, salt)
    tokenizer = state.engine.tokenizer
    strings = None
    if body.return_token_strs and tokenizer is not None:
        strings = await state.engine.run_in_thread(tokenizer.convert_ids_to_tokens, ids)
    return JSON(TokenizeResponse(len(ids), processor.max_model_len, ids, strings))


async def detokenize(request: Request) -> Response:
    """Handle POST /detokenize."""
    checked = await read_request(request, DetokenizeRequest)
    state, body = checked.state, checked.body
    tokenizer = state.engine.tokenizer
    if tokenizer is None:
        raise bad_request("tokens cannot be decoded: the engine runs without a tokenizer (--skip-tokenizer-init)")
    limit = state.engine.input_processor.vocab_size - 1
    for token_id in (min(body.tokens, default=0), max(body.tokens, default=0)):
        if not 0 <= token_id <= limit:
            raise bad_request(
                f"tokens must be between 0 and {limit} (the model's vocabulary), got {token_id}", "tokens"
            )
    text = await state.engine.run_in_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return JSON(DetokenizeResponse(text))
