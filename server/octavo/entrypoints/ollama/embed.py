"""POST /api/embed and /api/embeddings"""

from __future__ import annotations

import time
from dataclasses import replace

from starlette.responses import Response

from octavo.entrypoints.dialect import CheckedRequest, Dialect, Prepared
from octavo.entrypoints.errors import bad_request
from octavo.entrypoints.fields.values import prompts_in
from octavo.entrypoints.generation.context import in_words_of
from octavo.entrypoints.generation.pooled import MAX_INPUTS, PooledOptions, how_to_pool, prepare_texts
from octavo.entrypoints.ollama.answers import EmbedAnswer, EmbeddingsAnswer
from octavo.entrypoints.ollama.prepare import num_ctx_of
from octavo.entrypoints.ollama.protocol import EmbeddingsRequest, EmbedRequest
from octavo.entrypoints.state import ServerState
from octavo.entrypoints.transport.responses import JSON
from octavo.interface.messages import EngineCoreRequest
from octavo.interface.pooling_params import PoolingParams, prompt_before


async def _prepare_embed(checked: CheckedRequest[EmbedRequest]) -> Prepared[EmbedRequest] | Response:
    """Texts that are too long lose their ends, unless ``truncate`` is false. Raises ValueError, APIError."""
    state, body = checked.state, checked.body
    num_ctx = num_ctx_of(state, body.options)
    asked = PoolingParams(dimensions=body.dimensions, normalize=True)
    prepared = Prepared(checked, [])
    if not body.input:
        return JSON(await _embed_answer(prepared, []))
    prepared.requests = await _prepare_texts(state, body.input, asked, num_ctx, body.truncate is not False)
    return prepared


async def _embed_answer(prepared: Prepared[EmbedRequest], vectors: list[list[float]]) -> EmbedAnswer:
    tokens = sum(len(request.prompt_token_ids) for request in prepared.requests)
    total = max(1, round(1e9 * (time.time() - prepared.checked.began)))
    return EmbedAnswer(prepared.body.model or prepared.state.model_name, vectors, total, 1, tokens)


async def _prepare_embeddings(checked: CheckedRequest[EmbeddingsRequest]) -> Prepared[EmbeddingsRequest] | Response:
    state, body = checked.state, checked.body
    if not body.prompt:
        return JSON(EmbeddingsAnswer([]))
    num_ctx = num_ctx_of(state, body.options)
    return Prepared(checked, await _prepare_texts(state, body.prompt, PoolingParams(), num_ctx, True))


async def _embeddings_answer(prepared: Prepared[EmbeddingsRequest], vectors: list[list[float]]) -> EmbeddingsAnswer:
    return EmbeddingsAnswer(vectors[0])


async def _prepare_texts(
    state: ServerState, texts: str | list[str], asked: PoolingParams, num_ctx: int | None, cut: bool
) -> list[EngineCoreRequest]:
    """Make a request a text. Texts of more than ``num_ctx`` tokens lose their ends with ``cut``. Raises APIError naming
    one otherwise."""
    options = PooledOptions()
    if cut:
        longest = state.engine.input_processor.longest_pooled
        options = PooledOptions(truncate_prompt_tokens=min(num_ctx or longest, longest), truncation_side="right")
    with in_words_of(names={"truncate_prompt_tokens": "truncate"}):
        pooling = how_to_pool(state, asked)
        options = replace(options, before=prompt_before(state.engine.config.model.pooler, asked))
        requests = await prepare_texts(state, pooling, prompts_in(texts, "input", MAX_INPUTS), options)
    lengths = [len(request.prompt_token_ids) for request in requests]
    if num_ctx is not None and (length := max(lengths)) > num_ctx:
        field = "input" if len(lengths) == 1 else f"input.{lengths.index(length)}"
        raise bad_request(
            f"{field} has {length} tokens, but options.num_ctx is {num_ctx}; raise it (at most max_model_len), shorten "
            "the text, or leave out truncate",
            field,
        )
    return requests


EMBED = Dialect("ollama_embed", EmbedRequest, _prepare_embed, _embed_answer, any_type=True)
EMBEDDINGS = Dialect("ollama_embeddings", EmbeddingsRequest, _prepare_embeddings, _embeddings_answer, any_type=True)
