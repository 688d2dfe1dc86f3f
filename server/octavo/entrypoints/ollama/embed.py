"""POST /api/embed and /api/embeddings"""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.admission import check_model, check_serving
from octavo.entrypoints.errors import bad_request
from octavo.entrypoints.generation.context import in_words_of
from octavo.entrypoints.ollama.answers import EmbedAnswer, EmbeddingsAnswer
from octavo.entrypoints.ollama.dialect import num_ctx_of
from octavo.entrypoints.ollama.protocol import EmbeddingsRequest, EmbedRequest
from octavo.entrypoints.openai.embeddings import EmbeddingRequest, prepare_embeddings, run_pooled
from octavo.entrypoints.state import ServerState, state_of
from octavo.entrypoints.transport.request_body import read_body
from octavo.entrypoints.transport.responses import JSON, unless_disconnected


async def embed(request: Request) -> Response:
    """Handle POST /api/embed: texts that are too long lose their ends, unless ``truncate`` is false."""
    began = time.perf_counter_ns()
    state = state_of(request)
    check_serving(state)
    body = await read_body(request, EmbedRequest, state, any_type=True)
    body.check()
    check_model(state, body.model, generates=False)
    num_ctx = num_ctx_of(state, body.options)
    model = body.model or state.model_name
    if not body.input:
        return JSON(EmbedAnswer(model, [], time.perf_counter_ns() - began, 1, 0))
    asked = EmbeddingRequest(input=body.input, dimensions=body.dimensions, normalize=True)
    vectors, tokens = await unless_disconnected(request, _vectors(state, asked, num_ctx, body.truncate is not False))
    total = time.perf_counter_ns() - began
    return JSON(EmbedAnswer(model, vectors, total, 1, tokens))


async def embeddings(request: Request) -> Response:
    """Handle POST /api/embeddings: one text."""
    state = state_of(request)
    check_serving(state)
    body = await read_body(request, EmbeddingsRequest, state, any_type=True)
    body.check()
    check_model(state, body.model, generates=False)
    if not body.prompt:
        return JSON(EmbeddingsAnswer([]))
    num_ctx = num_ctx_of(state, body.options)
    vectors, _ = await unless_disconnected(request, _vectors(state, EmbeddingRequest(input=body.prompt), num_ctx, True))
    return JSON(EmbeddingsAnswer(vectors[0]))


async def _vectors(
    state: ServerState, asked: EmbeddingRequest, num_ctx: int | None, cut: bool
) -> tuple[list[list[float]], int]:
    """A vector a text, and the number of tokens of all. Texts of more than ``num_ctx`` tokens lose their ends with
    ``cut``. Raises APIError naming one otherwise."""
    if cut:
        longest = state.engine.input_processor.longest_pooled
        asked.truncate_prompt_tokens, asked.truncation_side = min(num_ctx or longest, longest), "right"
    with in_words_of(names={"truncate_prompt_tokens": "truncate"}):
        requests = await prepare_embeddings(state, asked)
    lengths = [len(request.prompt_token_ids) for request in requests]
    if num_ctx is not None and (length := max(lengths)) > num_ctx:
        field = "input" if len(lengths) == 1 else f"input.{lengths.index(length)}"
        raise bad_request(
            f"{field} has {length} tokens, but options.num_ctx is {num_ctx}; raise it (at most max_model_len), shorten "
            "the text, or leave out truncate",
            field,
        )
    return await run_pooled(state, requests), sum(lengths)
