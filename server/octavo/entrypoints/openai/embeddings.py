"""POST /v1/embeddings: one unit vector per text, pooled from the model's last hidden states."""

from __future__ import annotations

import base64
import sys
import uuid
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.admission import check_model, check_serving
from octavo.entrypoints.errors import APIError, bad_request
from octavo.entrypoints.generation.run import Generation, PromptOptions, encode_choices
from octavo.entrypoints.openai.protocol import (
    Count,
    Priority,
    PromptField,
    RequestBody,
    Truncation,
    TruncationSide,
    prompts_in,
)
from octavo.entrypoints.openai.unsupported_fields import EMBEDDING, UnsupportedFields
from octavo.entrypoints.state import ServerState, state_of
from octavo.entrypoints.transport.request_body import read_body
from octavo.entrypoints.transport.responses import JSON, unless_disconnected
from octavo.interface.messages import EngineCoreRequest
from octavo.interface.sampling_params import RequestOutputKind, SamplingParams

MAX_INPUTS = 2_048  # as OpenAI's API
_WORTH_A_THREAD = 4_000  # characters or ids


class EmbeddingRequest(RequestBody):
    """OpenAI's fields, and ``pooling``: "mean" of all tokens or the "last" one; by default as the server is set up."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = EMBEDDING
    NEEDS: ClassVar[dict[str, tuple[str, bool | None]]] = {"truncation_side": ("truncate_prompt_tokens", None)}

    input: PromptField
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    user: str | None = None
    pooling: Literal["mean", "last"] | None = None
    truncate_prompt_tokens: Truncation = None
    truncation_side: TruncationSide | None = None
    add_special_tokens: bool | None = None
    priority: Priority | None = None

    def inputs(self) -> list[str | list[int]]:
        """The texts, each a string or token ids. Raises APIError."""
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
    body = await read_body(request, EmbeddingRequest, state)
    body.check()
    check_model(state, body.model)
    size = state.engine.config.model.hidden_size
    if body.dimensions not in (None, size):
        raise bad_request(
            f"dimensions must be {size}, got {body.dimensions}: the model's vectors cannot be truncated; drop it",
            "dimensions",
        )
    texts = body.inputs()
    requests = (
        await state.engine.run_in_thread(_prepare, state, body, texts)
        if sum(map(len, texts)) > _WORTH_A_THREAD
        else _prepare(state, body, texts)
    )
    return await unless_disconnected(request, _answer(state, body, requests))


def _prepare(state: ServerState, body: EmbeddingRequest, texts: Sequence[str | list[int]]) -> list[EngineCoreRequest]:
    """Requests for the core. Raises APIError naming the text."""
    options = PromptOptions(
        body.priority or 0, None, body.add_special_tokens is not False, body.truncate_prompt_tokens,
        body.truncation_side or "left",
    )  # fmt: skip
    requests = []
    for i, text in enumerate(texts):
        try:
            request = state.engine.input_processor.process(
                uuid.uuid4().hex,
                text,
                SamplingParams(max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY),
                **vars(options),
            )
        except ValueError as error:
            subject, _, rest = str(error).partition(" ")
            if not subject.startswith("prompt"):
                raise
            field = "input" if len(texts) == 1 else f"input.{i}"
            raise bad_request(f"{field} {rest}", field) from None
        request.pooling = body.pooling or state.args.embedding_pooling
        requests.append(request)
    return requests


async def _answer(state: ServerState, body: EmbeddingRequest, requests: list[EngineCoreRequest]) -> Response:
    """Sends at most max_num_seqs texts at a time, so that a long list does not fill the queue."""
    vectors: list[list[float]] = []
    step = state.engine.config.scheduler.max_num_seqs
    for start in range(0, len(requests), step):
        wave = requests[start : start + step]
        with Generation(state, wave, [None] * len(wave), admit=start == 0) as generation:
            await generation.start()
            for output in await generation.final_outputs():
                if output.embedding is None:
                    raise APIError(500, "The engine returned no vector", code="engine_error")
                vectors.append(output.embedding)
    encode = _base64 if body.encoding_format == "base64" else list
    data = await encode_choices(
        state, [(partial(_embedding, i, vector, encode), len(vector) // 20) for i, vector in enumerate(vectors)]
    )
    tokens = sum(len(request.prompt_token_ids) for request in requests)
    return JSON(EmbeddingList(state.model_name, data, EmbeddingUsage(tokens, tokens)))


def _embedding(index: int, vector: list[float], encode: Callable[[list[float]], list[float] | str]) -> Embedding:
    return Embedding(index, encode(vector))


def _base64(vector: list[float]) -> str:
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
