"""GET /v1/models and /v1/models/{id}"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from octavo.entrypoints.admission import check_model, check_serving
from octavo.entrypoints.anthropic.models import AnthropicModel, anthropic_model, page_of
from octavo.entrypoints.errors import APIError, bad_request, is_anthropic
from octavo.entrypoints.lora.listed import AdapterReport
from octavo.entrypoints.lora.served import ServedAdapter
from octavo.entrypoints.openai.answers import ModelCard, ModelList
from octavo.entrypoints.operation import Operation
from octavo.entrypoints.state import ServerState, state_of
from octavo.entrypoints.transport.request_body import read_body
from octavo.entrypoints.transport.responses import JSON
from octavo.errors import ConfigError
from octavo.interface.sampling_params import recommended_sampling
from octavo.version import __version__


class LoadAdapterRequest(BaseModel):
    """The body of /v1/load_lora_adapter; fields that are not known are ignored, as vLLM does."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False  # replace an adapter of that name


class UnloadAdapterRequest(BaseModel):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str


async def load_adapter(request: Request) -> Response:
    """Handle POST /v1/load_lora_adapter. Returns once requests may name the adapter."""
    state = _updating(request)
    body = await read_body(request, LoadAdapterRequest, state)
    await state.adapters.load(body.lora_name, body.lora_path, body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(request: Request) -> Response:
    """Handle POST /v1/unload_lora_adapter. Requests under way end as they would have."""
    state = _updating(request)
    body = await read_body(request, UnloadAdapterRequest, state)
    state.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _updating(request: Request) -> ServerState:
    """The server's state, where adapters may come and go. Raises a 403."""
    state = state_of(request)
    if not state.args.allow_runtime_lora_updating:
        raise APIError(403, "adapters cannot be changed here: the server runs without --allow-runtime-lora-updating")
    check_serving(state)
    if state.engine.config.lora is None:
        raise bad_request("the server runs without LoRA adapters (--enable-lora)")
    return state


def _card(state: ServerState, name: str) -> ModelCard:
    config = state.engine.config
    sampling = recommended_sampling(config.model.generation_config)
    modalities = ["text", "image"] if config.takes_images else ["text"]
    longest = config.scheduler.max_model_len
    return ModelCard(name, state.created, config.model.model, longest, sampling, modalities, state.tool_format)


def _adapter_card(state: ServerState, served: ServedAdapter) -> ModelCard:
    card = _card(state, served.adapter.name)
    root = served.source or served.adapter.path
    card.created, card.root, card.parent = served.created, root, served.base or state.model_name
    return card


async def adapters(request: Request) -> Response:
    """Handle GET /v1/adapters of the management port."""
    return JSON(_with_adapters(request).adapter_list.report())


async def reload_adapters(request: Request) -> Response:
    """Handle POST /v1/adapters/reload of the management port: reads --lora-list now. What is new is loaded afterwards,
    as /v1/adapters tells."""
    state = _with_adapters(request)
    try:
        await state.adapter_list.reload()
    except ConfigError as error:
        raise bad_request(error) from None
    return JSON(state.adapter_list.report())


def _with_adapters(request: Request) -> ServerState:
    state = state_of(request)
    if state.engine.config.lora is None:
        raise APIError(404, "the server runs without LoRA adapters (--enable-lora)")
    return state


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
    template = state.chat_options.chat_template or (
        tokenizer.chat_templates.get("default", "") if tokenizer is not None else ""
    )
    sampling = recommended_sampling(config.model.generation_config)
    settings = {"n_ctx": config.scheduler.max_model_len, "params": sampling}
    modalities = {"vision": config.takes_images, "audio": False}
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
        names = [*state.model_names, *(served.adapter.name for served in state.adapters.all())]
        return JSON(page_of([_anthropic_card(state, name) for name in names]))
    cards = [_card(state, name) for name in state.model_names]
    return JSON(ModelList([*cards, *(_adapter_card(state, served) for served in state.adapters.all())]))


async def retrieve_model(request: Request) -> Response:
    """Handle GET /v1/models/{id}, in Anthropic's form for its clients."""
    state, name = state_of(request), request.path_params["model_id"]
    check_model(state, name)
    if is_anthropic(request.scope):
        return JSON(_anthropic_card(state, name))
    served = state.adapters[name]
    return JSON(_card(state, name) if served is None else _adapter_card(state, served))


OPERATIONS = (
    Operation("GET", "/props", props, "Get server properties (llama.cpp format)", answer=Props),
    Operation("GET", "/v1/models", list_models, "List models", answer=ModelList),
    Operation("GET", "/v1/models/{model_id:path}", retrieve_model, "Retrieve a model", answer=ModelCard),
    Operation(
        "POST",
        "/v1/load_lora_adapter",
        load_adapter,
        "Load a LoRA adapter, if the server allows it",
        body=LoadAdapterRequest,
    ),
    Operation(
        "POST",
        "/v1/unload_lora_adapter",
        unload_adapter,
        "Unload a LoRA adapter",
        body=UnloadAdapterRequest,
    ),
)
ADAPTER_OPERATIONS = (  # of the management port alone
    Operation(
        "GET",
        "/v1/adapters",
        adapters,
        "List LoRA adapters with their states",
        answer=AdapterReport,
    ),
    Operation("POST", "/v1/adapters/reload", reload_adapters, "Read --lora-list again", answer=AdapterReport),
)
