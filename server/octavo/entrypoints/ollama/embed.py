"""POST /api/embed and /api/embeddings"""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.admission import check_model, check_serving
from octavo.entrypoints.errors import bad_request
from octavo.entrypoints.fields.values import prompts_in
from octavo.entrypoints.generation.context import in_words_of
from octavo.entrypoints.generation.pooled import MAX_INPUTS, PooledOptions, how_to_pool, prepare_texts, run_pooled
from octavo.entrypoints.ollama.answers import EmbedAnswer, EmbeddingsAnswer
from octavo.entrypoints.ollama.dialect import num_ctx_of
from octavo.entrypoints.ollama.protocol import EmbeddingsRequest, EmbedRequest
from octavo.entrypoints.state import ServerState, state_of
from octavo.entrypoints.transport.request_body import read_body
from octavo.entrypoints.transport.responses import JSON, unless_disconnected
from octavo.interface.pooling_params import PoolingParams


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
    asked = PoolingParams(dimensions=body.dimensions, normalize=True)
    work = _vectors(state, body.input, asked, num_ctx, body.truncate is not False)
    vectors, tokens = await unless_disconnected(request, work)
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
    vectors, _ = await unless_disconnected(request, _vectors(state, body.prompt, PoolingParams(), num_ctx, True))
    return JSON(EmbeddingsAnswer(vectors[0]))


async def _vectors(
    state: ServerState, texts: str | list[str], asked: PoolingParams, num_ctx: int | None, cut: bool
) -> tuple[list[list[float]], int]:
    """A vector a text, and the number of tokens of all. Texts of more than ``num_ctx`` tokens lose their ends with
    ``cut``. Raises APIError naming one otherwise."""
    options = PooledOptions()
    if cut:
        longest = state.engine.input_processor.longest_pooled
        options = PooledOptions(truncate_prompt_tokens=min(num_ctx or longest, longest), truncation_side="right")
    with in_words_of(names={"truncate_prompt_tokens": "truncate"}):
        pooling = how_to_pool(state, asked)
        requests = await prepare_texts(state, pooling, prompts_in(texts, "input", MAX_INPUTS), options)
    lengths = [len(request.prompt_token_ids) for request in requests]
    if num_ctx is not None and (length := max(lengths)) > num_ctx:
        field = "input" if len(lengths) == 1 else f"input.{lengths.index(length)}"
        raise bad_request(
            f"{field} has {length} tokens, but options.num_ctx is {num_ctx}; raise it (at most max_model_len), shorten "
            "the text, or leave out truncate",
            field,
        )
    return await run_pooled(state, requests), sum(lengths)
