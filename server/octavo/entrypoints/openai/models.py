"""GET /v1/models and /v1/models/{id}"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.admission import check_model
from octavo.entrypoints.openai.responses import ModelCard, ModelList
from octavo.entrypoints.state import ServerState, state_of
from octavo.entrypoints.transport.responses import JSON
from octavo.interface.sampling_params import recommended_sampling


def _card(state: ServerState, name: str) -> ModelCard:
    config = state.engine.config
    sampling = recommended_sampling(config.model.generation_config)
    return ModelCard(name, state.created, config.model.model, config.scheduler.max_model_len, sampling)


async def list_models(request: Request) -> Response:
    """Handle GET /v1/models."""
    state = state_of(request)
    return JSON(ModelList([_card(state, name) for name in state.model_names]))


async def retrieve_model(request: Request) -> Response:
    """Handle GET /v1/models/{id}."""
    state, name = state_of(request), request.path_params["model_id"]
    check_model(state, name)
    return JSON(_card(state, name))
