"""GET /api/version, /api/tags, /api/ps, POST /api/show: what is served, as Ollama's clients ask for it."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from octavo.chat.infill import find_infill_tokens
from octavo.entrypoints.admission import check_model
from octavo.entrypoints.errors import bad_request
from octavo.entrypoints.ollama.answers import timestamp
from octavo.entrypoints.ollama.prepare import can_think, template_of
from octavo.entrypoints.ollama.protocol import ShowRequest
from octavo.entrypoints.state import ServerState, state_of
from octavo.entrypoints.transport.request_body import read_body
from octavo.entrypoints.transport.responses import JSON
from octavo.errors import ModelError
from octavo.fetch.description import Description, describe
from octavo.interface.model_files import ModelFiles
from octavo.interface.sampling_params import recommended_sampling

# The version of Ollama whose API this is: clients compare it with the oldest one that they know how to talk to.
_OLLAMA_VERSION = "0.12.6"
_NEVER = 2**33  # seconds since the epoch at which the model is unloaded: in the year 2242
_ARCHITECTURE_FIELDS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "rope.freq_base": "rope_theta",
}


class Details(Struct):
    """The kind of model."""

    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    parent_model: str = ""


class ModelEntry(Struct):
    """One name of the served model. ``size``: bytes of its weights."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class Tags(Struct):
    """The answer of /api/tags."""

    models: list[ModelEntry]


class RunningEntry(Struct):
    """A name of the model, which is loaded. ``size_vram``: bytes of its weights on a GPU."""

    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class Running(Struct):
    """The answer of /api/ps."""

    models: list[RunningEntry]


class Show(Struct):
    """The answer of /api/show."""

    license: str
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class VersionAnswer(Struct):
    """The answer of /api/version."""

    version: str


def with_tag(name: str) -> str:
    """A served name as Ollama lists it: ``x`` is ``x:latest``."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


async def version(request: Request) -> Response:
    """Handle GET /api/version."""
    return JSON(VersionAnswer(_OLLAMA_VERSION))


async def tags(request: Request) -> Response:
    """Handle GET /api/tags."""
    state = state_of(request)
    described = await state.engine.run_in_thread(_describe, state)
    entries = [
        ModelEntry(name, name, timestamp(state.created), described.num_bytes, _digest(state), _details(described))
        for name in map(with_tag, [*state.model_names, *(served.adapter.name for served in state.adapters.all())])
    ]
    return JSON(Tags(entries))


async def running(request: Request) -> Response:
    """Handle GET /api/ps."""
    state = state_of(request)
    described = await state.engine.run_in_thread(_describe, state)
    size = described.num_bytes
    on_gpu = size if state.engine.config.device == "cuda" else 0
    name = with_tag(state.model_name)
    context = state.engine.config.scheduler.max_model_len
    entry = RunningEntry(name, name, size, _digest(state), _details(described), timestamp(_NEVER), on_gpu, context)
    return JSON(Running([entry]))


async def show(request: Request) -> Response:
    """Handle POST /api/show."""
    state = state_of(request)
    body = await read_body(request, ShowRequest, state, any_type=True)
    body.check()
    name = body.model or body.name
    if not name:
        raise bad_request("model is required: name one that is served", "model")
    check_model(state, name)
    described = await state.engine.run_in_thread(_describe, state)
    config = state.engine.config.model
    sampling = recommended_sampling(config.generation_config)
    parameters = "\n".join(f"{key} {value}" for key, value in sampling.items())
    template = template_of(state)
    lines = [f"# served by Octavo, not from a Modelfile\nFROM {config.model}", f'TEMPLATE """{template}"""']
    lines += [f"PARAMETER {key} {value}" for key, value in sampling.items()]
    return JSON(
        Show(
            described.license,
            "\n".join(lines),
            parameters,
            template,
            _details(described),
            _model_info(state, described, body.verbose is True),
            _capabilities(state),
            timestamp(state.created),
        )
    )


def _capabilities(state: ServerState) -> list[str]:
    """List the model's tasks in Ollama's words."""
    tasks = state.engine.config.model.pooler.tasks
    found = []
    if "generate" in tasks:
        found.append("completion")
        if state.engine.config.takes_images:
            found.append("vision")
        if template_of(state) and state.args.enable_auto_tool_choice:
            found.append("tools")
        if can_think(state):
            found.append("thinking")
        if state.engine.tokenizer is not None and find_infill_tokens(state.engine.tokenizer) is not None:
            found.append("insert")
    elif "embed" in tasks:
        found.append("embedding")
    return found


def _model_info(state: ServerState, described: Description, verbose: bool) -> dict[str, Any]:
    """``verbose``: with the vocabulary."""
    config, kind = state.engine.config, described.architecture
    fields = config.model.hf_config
    info: dict[str, Any] = {
        "general.architecture": kind,
        "general.basename": described.name or state.model_name,
        "general.parameter_count": described.num_parameters,
        f"{kind}.context_length": config.scheduler.max_model_len,  # as it is served
    }
    info |= {f"{kind}.{name}": fields[ours] for name, ours in _ARCHITECTURE_FIELDS.items() if ours in fields}
    if (tokenizer := state.engine.tokenizer) is not None:
        info["tokenizer.ggml.bos_token_id"] = tokenizer.bos_token_id
        info["tokenizer.ggml.eos_token_id"] = tokenizer.eos_token_id
        info["tokenizer.ggml.tokens"] = tokenizer.convert_ids_to_tokens(range(len(tokenizer))) if verbose else None
    return info


def _details(described: Description) -> Details:
    kind = described.architecture
    return Details(described.format, kind, [kind], described.parameter_size, described.quantization)


def _digest(state: ServerState) -> str:
    """Differs with whatever changes outputs, as the fingerprint does."""
    return hashlib.sha256(state.fingerprint.encode()).hexdigest()


def _describe(state: ServerState) -> Description:
    model = state.engine.config.model
    return _described(model.files.format, model.files.directory, model.files.weights, model.files.model) or Description(
        model.files.format, str(model.hf_config.get("model_type", "")), model.quantization or model.dtype, 0, 0
    )


@lru_cache
def _described(form: str, directory: str, weights: tuple[str, ...], name: str) -> Description | None:
    """Once a server: the files may be changed or deleted while it runs. None where they are not to be read."""
    try:
        return describe(ModelFiles(name, form, directory, weights)) if weights else None
    except (ModelError, OSError):
        return None
