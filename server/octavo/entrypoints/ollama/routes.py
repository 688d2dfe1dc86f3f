"""POST /api/chat and /api/generate, and the routes that are refused"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.dialect import CheckedRequest, Dialect
from octavo.entrypoints.errors import APIError
from octavo.entrypoints.ollama.answers import NDJSON, loaded, whole
from octavo.entrypoints.ollama.events import AnswerLines
from octavo.entrypoints.ollama.prepare import PreparedAnswer, prepare_chat, prepare_generate
from octavo.entrypoints.ollama.protocol import IMAGES, ChatRequest, GenerateRequest


async def _prepare_chat(checked: CheckedRequest[ChatRequest]) -> PreparedAnswer | Response:
    return await prepare_chat(checked) or loaded(checked)


async def _prepare_generate(checked: CheckedRequest[GenerateRequest]) -> PreparedAnswer | Response:
    return await prepare_generate(checked) or loaded(checked)


_COMMON: dict[str, Any] = {"images": IMAGES, "any_type": True, "media_type": NDJSON}
CHAT = Dialect("ollama_chat", ChatRequest, _prepare_chat, whole, AnswerLines, **_COMMON)
GENERATE = Dialect("ollama_generate", GenerateRequest, _prepare_generate, whole, AnswerLines, **_COMMON)


async def not_built(request: Request) -> Response:
    """Refuse what changes the models of a server."""
    what = request.url.path.rpartition("/")[2]
    raise APIError(
        501,
        f"this server has one model and keeps it: there is no {what} over HTTP; on its machine there are `octavo "
        "pull`, `octavo list`, `octavo show` and `octavo rm`",
    )
