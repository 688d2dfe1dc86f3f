"""Prompts that are pooled into vectors: their requests and their results."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.entrypoints.errors import APIError, bad_request
from octavo.entrypoints.generation.run import Generation
from octavo.entrypoints.state import ServerState
from octavo.interface.messages import EngineCoreRequest
from octavo.interface.pooling import Pooling
from octavo.interface.pooling_params import PoolingParams, embedding_pooling

MAX_INPUTS = 2_048  # as OpenAI's API
_WORTH_A_THREAD = 4_000  # characters or ids


@dataclass(frozen=True)
class PooledOptions:
    """Options that tokenise and queue prompts to pool."""

    priority: int = 0
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    before: str = ""  # put before texts


def how_to_pool(state: ServerState, asked: PoolingParams) -> Pooling:
    """Choose how vectors are made: by the request, the server's options or the model's files. Raises ValueError."""
    model = state.engine.config.model
    asked = replace(asked, pooling=asked.pooling or state.args.embedding_pooling)
    return embedding_pooling(model.pooler, asked, model.hidden_size)


async def prepare_texts(
    state: ServerState, pooling: Pooling, texts: Sequence[str | list[int]], options: PooledOptions, field: str = "input"
) -> list[EngineCoreRequest]:
    """Requests for the core, one a text. Raises ValueError, APIError naming the text in ``field``."""
    if sum(map(len, texts)) > _WORTH_A_THREAD:
        prepared: list[EngineCoreRequest] = await state.engine.run_in_thread(
            _requests, state, pooling, texts, options, field
        )
        return prepared
    return _requests(state, pooling, texts, options, field)


def _requests(
    state: ServerState, pooling: Pooling, texts: Sequence[str | list[int]], options: PooledOptions, name: str
) -> list[EngineCoreRequest]:
    """Requests for the core. Raises APIError naming the text."""
    requests = []
    for i, text in enumerate(texts):
        field = name if name == "input" and len(texts) == 1 else f"{name}.{i}"
        request = pooled_request(state, pooling, text, options, field)
        requests.append(request)
    return requests


def pooled_request(
    state: ServerState, pooling: Pooling, prompt: Any, options: PooledOptions, field: str, called: str | None = None
) -> EngineCoreRequest:
    """A request for the core. Raises APIError that names the prompt's ``field``, as it is ``called``."""
    try:
        return state.engine.input_processor.process_pooling(uuid.uuid4().hex, prompt, pooling, **vars(options))
    except ValueError as error:
        subject, _, rest = str(error).partition(" ")
        if not subject.startswith("prompt"):
            raise
        raise bad_request(f"{called or field} {rest}", field) from None


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
