"""POST /v1/embeddings: one vector per text, or of a conversation with images, pooled from the model's last hidden
states."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Struct
from pydantic import ConfigDict
from starlette.responses import Response

from octavo.chat.messages import Conversation
from octavo.entrypoints.dialect import CheckedRequest, Dialect, Prepared
from octavo.entrypoints.errors import bad_request
from octavo.entrypoints.fields.unsupported import EMBEDDING, UnsupportedFields
from octavo.entrypoints.fields.values import (
    IMAGES,
    Count,
    MessagesField,
    ModelBody,
    Priority,
    TemplateVariables,
    Truncation,
    TruncationSide,
    prompts_in,
)
from octavo.entrypoints.generation.chat import prompt_to_pool, read_messages
from octavo.entrypoints.generation.pooled import (
    MAX_INPUTS,
    PooledOptions,
    how_to_pool,
    pooled_request,
    prepare_texts,
)
from octavo.entrypoints.generation.run import PromptOptions, encode_choices
from octavo.entrypoints.openai.float_vectors import EmbedDtype, Endianness, as_base64, packed
from octavo.entrypoints.openai.protocol import PromptField
from octavo.entrypoints.state import ServerState
from octavo.interface.messages import EngineCoreRequest
from octavo.interface.pooling import Pooling
from octavo.interface.pooling_params import PoolingParams, prompt_before

InputType = Literal["query", "search_query", "document", "passage", "search_document", "classification", "clustering"]
_BYTES = "application/octet-stream"
MAX_IN_HEADER = 256  # vectors: 110 bytes each, and proxies take some 60 KB
_CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")


class EmbeddingRequest(ModelBody):
    """OpenAI's fields; ``pooling``: "mean" of tokens, the "last" one, the first ("cls") or others; ``normalize``, or
    ``use_activation`` as newer vLLMs call it: vectors of length 1. By default as the model's own files say, or as the
    server is set up. ``prompt_name``: the prompt of the model's files that is put before texts, or ``input_type``: what
    they are for. ``encoding_format`` "bytes": the vectors alone, one behind the other, and where each is in the header
    metadata, "bytes_only": without that header; ``embed_dtype`` (None: float32) and ``endianness`` (None: little) are
    of bytes and base64. Instead of ``input``, ``messages`` and the options of the chat template, as vLLM has them: one
    vector, of a conversation that may have images."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = EMBEDDING
    NEEDS: ClassVar[dict[str, tuple[str, bool | None]]] = {
        "truncation_side": ("truncate_prompt_tokens", None),
        **dict.fromkeys(_CHAT_FIELDS, ("messages", None)),
        **dict.fromkeys(("prompt_name", "input_type"), ("input", None)),
    }
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
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: EmbedDtype | None = None
    endianness: Endianness | None = None
    dimensions: Count | None = None
    user: str | None = None
    pooling: Literal["mean", "last", "cls", "max", "weightedmean", "mean_sqrt_len"] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: Truncation = None
    truncation_side: TruncationSide | None = None
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None

    def inputs(self) -> list[str | list[int]]:
        """The texts, each a string or token ids. Raises APIError."""
        if self.input is None:
            raise bad_request("exactly one of input and messages must be given", "input")
        return prompts_in(self.input, "input", MAX_INPUTS)

    def pooled_options(self) -> PooledOptions:
        """Return the options of the prompts."""
        special = self.add_special_tokens is not False or self.messages is not None
        return PooledOptions(self.priority or 0, special, self.truncate_prompt_tokens, self.truncation_side)


class Embedding(Struct):
    """One text's vector."""

    index: int
    embedding: list[float] | str  # base64: of the bytes that embed_dtype and endianness say
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


async def prepare_embeddings(
    state: ServerState, body: EmbeddingRequest, field: str = "input"
) -> list[EngineCoreRequest]:
    """Requests for the core, one a text. Raises ValueError, APIError naming the text in ``field``, or another field."""
    names = ("dimensions", "normalize", "use_activation", "pooling", "prompt_name", "input_type")
    asked = PoolingParams(**{name: getattr(body, name) for name in names})
    pooling = how_to_pool(state, asked)
    if body.messages is not None:
        return [await _prepare_conversation(state, body, pooling, body.messages)]
    options = replace(body.pooled_options(), before=prompt_before(state.engine.config.model.pooler, asked))
    return await prepare_texts(state, pooling, body.inputs(), options, field)


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
    return pooled_request(state, pooling, prompt, body.pooled_options(), "messages", "messages: the prompt")


async def _prepare(checked: CheckedRequest[EmbeddingRequest]) -> Prepared[EmbeddingRequest]:
    body = checked.body
    requests = await prepare_embeddings(checked.state, body)
    if body.encoding_format == "bytes" and len(requests) > MAX_IN_HEADER:
        raise bad_request(
            f"encoding_format bytes takes at most {MAX_IN_HEADER} texts, whose places are in a header, got "
            f"{len(requests)}; send fewer, or ask for bytes_only",
            "encoding_format",
        )
    return Prepared(checked, requests)


async def _whole(prepared: Prepared[EmbeddingRequest], vectors: list[list[float]]) -> EmbeddingList | Response:
    body = prepared.body
    dtype, order = body.embed_dtype or "float32", body.endianness or "little"
    if body.encoding_format in ("bytes", "bytes_only"):
        pack = partial(packed, dtype=dtype, order=order)
        parts = await prepared.state.engine.run_in_thread(lambda: [*map(pack, vectors)])
        return _in_bytes(prepared, parts, (dtype, order, len(vectors[0])))
    encode = partial(as_base64, dtype=dtype, order=order) if body.encoding_format == "base64" else list
    data = await encode_choices(
        prepared.state,
        [(partial(_embedding, i, vector, encode), len(vector) // 20) for i, vector in enumerate(vectors)],
    )
    return EmbeddingList(prepared.state.model_name, data, embedding_usage(prepared.requests))


def _in_bytes(prepared: Prepared[EmbeddingRequest], parts: list[bytes], how: tuple[str, str, int]) -> Response:
    """The vectors one behind the other; unless they are asked for alone, the header ``metadata`` says where each is."""
    headers = None
    if prepared.body.encoding_format == "bytes":
        dtype, order, length = how
        ends = [*accumulate(map(len, parts))]
        items = [
            PackedVector(i, dtype, order, end - len(part), end, [length])
            for i, (part, end) in enumerate(zip(parts, ends, strict=True))
        ]
        usage = embedding_usage(prepared.requests)
        began = int(prepared.checked.began)
        found = PackedVectors(f"embd-{uuid.uuid4().hex}", began, prepared.state.model_name, items, usage)
        headers = {"metadata": json.dumps(msgspec.to_builtins(found))}
    return Response(b"".join(parts), headers=headers, media_type=_BYTES)


class PackedVector(Struct):
    """The place of a vector in an answer of bytes: from ``start`` to before ``end``."""

    index: int
    embed_dtype: str
    endianness: str
    start: int
    end: int
    shape: list[int]


class PackedVectors(Struct):
    """The header ``metadata`` of an answer of bytes."""

    id: str
    created: int
    model: str
    data: list[PackedVector]
    usage: EmbeddingUsage


def embedding_usage(requests: Sequence[EngineCoreRequest]) -> EmbeddingUsage:
    """Count the tokens of prompts."""
    tokens = sum(len(request.prompt_token_ids) for request in requests)
    return EmbeddingUsage(tokens, tokens)


def _embedding(index: int, vector: list[float], encode: Callable[[list[float]], list[float] | str]) -> Embedding:
    return Embedding(index, encode(vector))


EMBEDDINGS = Dialect("create_embeddings", EmbeddingRequest, _prepare, _whole, images=IMAGES, media_type=_BYTES)
