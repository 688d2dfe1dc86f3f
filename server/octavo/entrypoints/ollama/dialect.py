"""What the routes of Ollama's API share: the media type of lines, names with a tag, what is not built."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.chat.tools.harmony import speaks_harmony
from octavo.entrypoints.errors import APIError
from octavo.entrypoints.ollama.protocol import Options
from octavo.entrypoints.state import ServerState

NDJSON = "application/x-ndjson"


def with_tag(name: str) -> str:
    """A served name as Ollama lists it: ``x`` is ``x:latest``."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def template_of(state: ServerState) -> str:
    """The chat template, '' where there is none."""
    tokenizer = state.engine.tokenizer
    try:
        return "" if tokenizer is None else tokenizer.get_chat_template(state.chat_options.chat_template)
    except ValueError:
        return ""


def can_think(state: ServerState) -> bool:
    """Whether reasoning is told from answers."""
    return state.chat_options.reasoning_parser is not None or speaks_harmony(state.chat_options, template_of(state))


def num_ctx_of(state: ServerState, options: Options | None) -> int | None:
    """``options.num_ctx`` where it is less than the server takes anyway. Agents ask for a fixed number, whatever the
    model is; more than there is means all there is, as in Ollama."""
    num_ctx = options.num_ctx if options is not None else None
    return None if num_ctx is None or num_ctx >= state.engine.config.scheduler.max_model_len else num_ctx


async def not_built(request: Request) -> Response:
    """Refuse what changes the models of a server."""
    what = request.url.path.rpartition("/")[2]
    raise APIError(
        501,
        f"this server has one model and keeps it: there is no {what} over HTTP; on its machine there are `octavo "
        "pull`, `octavo list`, `octavo show` and `octavo rm`",
    )
