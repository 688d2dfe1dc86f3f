"""POST /v1/embeddings: one vector per text, or of a conversation with images, pooled from the model's last hidden
states."""

from __future__ import annotations

import base64
import sys
import uuid
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from msgspec import Struct
from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from octavo.chat.messages import Conversation
from octavo.entrypoints.admission import check_model, check_serving
from octavo.entrypoints.errors import APIError, bad_request
from octavo.entrypoints.fields.unsupported import EMBEDDING, UnsupportedFields
from octavo.entrypoints.generation.chat import prompt_to_pool, read_messages
from octavo.entrypoints.generation.run import Generation, PromptOptions, encode_choices
from octavo.entrypoints.openai.protocol import (
    IMAGES,
    Count,
    MessagesField,
    Priority,
    PromptField,
    RequestBody,
    TemplateVariables,
    Truncation,
    TruncationSide,
    prompts_in,
)
from octavo.entrypoints.state import ServerState, state_of
from octavo.entrypoints.transport.request_body import read_body
from octavo.entrypoints.transport.responses import JSON, unless_disconnected
from octavo.interface.messages import EngineCoreRequest
from octavo.interface.pooling import Pooling
from octavo.interface.pooling_params import PoolingParams, embedding_pooling

MAX_INPUTS = 2_048  # as OpenAI's API
_CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")
_WORTH_A_THREAD = 4_000  # characters or ids


class EmbeddingRequest(RequestBody):
    """OpenAI's fields; ``pooling``: "mean" of all tokens, the "last" one or the first ("cls"); ``normalize``, or
    ``use_activation`` as newer vLLMs call it: vectors of length 1. By default as the model's own files say, or as the
    server is set up. Instead of ``input``, ``messages`` and the options of the chat template, as vLLM has them: one
    vector, of a conversation that may have images."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = EMBEDDING
    NEEDS: ClassVar[dict[str, tuple[str, bool | None]]] = {
        "truncation_side": ("truncate_prompt_tokens", None), **dict.fromkeys(_CHAT_FIELDS, ("messages", None)),
    }  # fmt: skip
    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {
                    "required": ["input"],
                    "properties": {"input": {"not": {"type": "null"}}, "messages": {"type": "null"}},
                },
                {"required": ["messages"], "properties": {"messages": {"type": "array"}, "input": {"type": "null"}}},
            ]
        }
    )

    input: PromptField | None = None
    messages: MessagesField | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: TemplateVariables = None
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    user: str | None = None
    pooling: Literal["mean", "last", "cls"] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: Truncation = None
    truncation_side: TruncationSide | None = None
    add_special_tokens: bool | None = None
    priority: Priority | None = None

    def inputs(self) -> list[str | list[int]]:
        """The texts, each a string or token ids. Raises APIError."""
        if self.input is None:
            raise bad_request("exactly one of input and messages must be given", "input")
        return prompts_in(self.input, "input", MAX_INPUTS)


class Embedding(Struct):
    """One text's vector."""

    index: int
    embedding: list[float] | str  # base64: little-endian float32
    object: str = "embedding"


class EmbeddingUsage(Struct):
    """Tokens of the request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct):
    """The response of /v1/embeddings."""

    model: str
    data: list[Embedding]  # or as JSON already: msgspec.Raw
    usage: EmbeddingUsage
    object: str = "list"


async def create_embeddings(request: Request) -> Response:
    """Handle POST /v1/embeddings."""
    state = state_of(request)
    check_serving(state)
    body = await read_body(request, EmbeddingRequest, state, images=IMAGES)
    body.check()
    check_model(state, body.model, generates=False)
    return await unless_disconnected(request, _answer(state, body, await prepare_embeddings(state, body)))


async def prepare_embeddings(
    state: ServerState, body: EmbeddingRequest, field: str = "input"
) -> list[EngineCoreRequest]:
    """Requests for the core, one a text. Raises ValueError, APIError naming the text in ``field``, or another field."""
    model = state.engine.config.model
    asked = PoolingParams(
        dimensions=body.dimensions,
        normalize=body.normalize,
        use_activation=body.use_activation,
        pooling=body.pooling or state.args.embedding_pooling,
    )
    pooling = embedding_pooling(model.pooler, asked, model.hidden_size)
    if body.messages is not None:
        return [await _prepare_conversation(state, body, pooling, body.messages)]
    texts = body.inputs()
    if sum(map(len, texts)) > _WORTH_A_THREAD:
        prepared: list[EngineCoreRequest] = await state.engine.run_in_thread(
            _prepare, state, body, pooling, texts, field
        )
        return prepared
    return _prepare(state, body, pooling, texts, field)


def _prepare(
    state: ServerState, body: EmbeddingRequest, pooling: Pooling, texts: Sequence[str | list[int]], name: str
) -> list[EngineCoreRequest]:
    """Requests for the core. Raises APIError naming the text."""
    requests = []
    for i, text in enumerate(texts):
        field = name if name == "input" and len(texts) == 1 else f"{name}.{i}"
        request = _request(state, body, pooling, text, body.add_special_tokens is not False, field)
        requests.append(request)
    return requests


def _request(
    state: ServerState, body: EmbeddingRequest, pooling: Pooling, prompt: Any, add_special_tokens: bool, field: str,
    called: str | None = None,
) -> EngineCoreRequest:  # fmt: skip
    """Raises APIError that names the prompt's ``field``, as it is ``called``."""
    try:
        return state.engine.input_processor.process_pooling(
            uuid.uuid4().hex,
            prompt,
            pooling,
            priority=body.priority or 0,
            add_special_tokens=add_special_tokens,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation_side=body.truncation_side,
        )
    except ValueError as error:
        subject, _, rest = str(error).partition(" ")
        if not subject.startswith("prompt"):
            raise
        raise bad_request(f"{called or field} {rest}", field) from None


async def _prepare_conversation(
    state: ServerState, body: EmbeddingRequest, pooling: Pooling, messages: list[dict[str, Any]]
) -> EngineCoreRequest:
    if body.input is not None:
        raise bad_request("exactly one of input and messages must be given", "input")
    fields = {name: getattr(body, name) for name in _CHAT_FIELDS}
    fields["add_generation_prompt"] = bool(body.add_generation_prompt)
    conversation = Conversation(await read_messages(state, messages), **fields)
    options = PromptOptions(add_special_tokens=bool(body.add_special_tokens)).for_tenant
    prompt = await prompt_to_pool(state, conversation, options)
    return _request(state, body, pooling, prompt, True, "messages", "messages: the prompt")


async def _answer(state: ServerState, body: EmbeddingRequest, requests: list[EngineCoreRequest]) -> Response:
    vectors = await run_pooled(state, requests)
    encode = as_base64 if body.encoding_format == "base64" else list
    data = await encode_choices(
        state, [(partial(_embedding, i, vector, encode), len(vector) // 20) for i, vector in enumerate(vectors)]
    )
    tokens = sum(len(request.prompt_token_ids) for request in requests)
    return JSON(EmbeddingList(state.model_name, data, EmbeddingUsage(tokens, tokens)))


async def run_pooled(state: ServerState, requests: list[EngineCoreRequest]) -> list[list[float]]:
    """The results of requests that are pooled. Sends at most max_num_seqs of them at a time, so that a long list does
    not fill the queue. Raises APIError."""
    results: list[list[float]] = []
    step = state.engine.config.scheduler.max_num_seqs
    for start in range(0, len(requests), step):
        wave = requests[start : start + step]
        with Generation(state, wave, [None] * len(wave), admit=start == 0) as generation:
            await generation.start()
            for output in await generation.final_outputs():
                if output.embedding is None:
                    raise APIError(500, "The engine returned no vector", code="engine_error")
                results.append(output.embedding)
    return results


def _embedding(index: int, vector: list[float], encode: Callable[[list[float]], list[float] | str]) -> Embedding:
    return Embedding(index, encode(vector))


def as_base64(vector: list[float]) -> str:
    """The vector as little-endian float32 in base64."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
