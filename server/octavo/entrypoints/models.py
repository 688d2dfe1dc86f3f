"""GET /v1/models and /v1/models/{id}"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.admission import check_model
from octavo.entrypoints.anthropic.models import AnthropicModel, anthropic_model, page_of
from octavo.entrypoints.errors import is_anthropic
from octavo.entrypoints.openai.responses import ModelCard, ModelList
from octavo.entrypoints.state import ServerState, state_of
from octavo.entrypoints.transport.responses import JSON
from octavo.interface.sampling_params import recommended_sampling
from octavo.version import __version__


def _card(state: ServerState, name: str) -> ModelCard:
    config = state.engine.config
    sampling = recommended_sampling(config.model.generation_config)
    return ModelCard(name, state.created, config.model.model, config.scheduler.max_model_len, sampling)


class Props(Struct):
    """The answer of /props: llama.cpp's names."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    chat_template: str
    modalities: dict[str, bool]
    model_path: str
    build_info: str


async def props(request: Request) -> Response:
    """Handle GET /props."""
    state = state_of(request)
    config, tokenizer = state.engine.config, state.engine.tokenizer
    template = state.chat_template or (tokenizer.chat_templates.get("default", "") if tokenizer is not None else "")
    sampling = recommended_sampling(config.model.generation_config)
    settings = {"n_ctx": config.scheduler.max_model_len, "params": sampling}
    modalities = {"vision": False, "audio": False}
    return JSON(
        Props(
            settings, config.scheduler.max_num_seqs, template, modalities, config.model.model, f"octavo-{__version__}"
        )
    )


def _anthropic_card(state: ServerState, name: str) -> AnthropicModel:
    return anthropic_model(name, state.created, state.engine.config.scheduler.max_model_len)


async def list_models(request: Request) -> Response:
    """Handle GET /v1/models, in Anthropic's form for its clients."""
    state = state_of(request)
    if is_anthropic(request.scope):
        return JSON(page_of([_anthropic_card(state, name) for name in state.model_names]))
    return JSON(ModelList([_card(state, name) for name in state.model_names]))


async def retrieve_model(request: Request) -> Response:
    """Handle GET /v1/models/{id}, in Anthropic's form for its clients."""
    state, name = state_of(request), request.path_params["model_id"]
    check_model(state, name)
    return JSON(_anthropic_card(state, name) if is_anthropic(request.scope) else _card(state, name))
