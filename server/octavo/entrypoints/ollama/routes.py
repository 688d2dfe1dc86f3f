"""POST /api/chat and /api/generate, and the routes that are refused"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.dialect import CheckedRequest, Dialect
from octavo.entrypoints.errors import APIError, OllamaErrorResponse
from octavo.entrypoints.ollama import embed, models
from octavo.entrypoints.ollama.answers import (
    NDJSON,
    ChatAnswer,
    EmbedAnswer,
    EmbeddingsAnswer,
    GenerateAnswer,
    loaded,
    whole,
)
from octavo.entrypoints.ollama.events import AnswerLines
from octavo.entrypoints.ollama.models import Running, Show, Tags, VersionAnswer
from octavo.entrypoints.ollama.prepare import PreparedAnswer, prepare_chat, prepare_generate
from octavo.entrypoints.ollama.protocol import IMAGES, ChatRequest, GenerateRequest, ShowRequest
from octavo.entrypoints.operation import Operation, answering


async def _prepare_chat(checked: CheckedRequest[ChatRequest]) -> PreparedAnswer | Response:
    return await prepare_chat(checked) or loaded(checked)


async def _prepare_generate(checked: CheckedRequest[GenerateRequest]) -> PreparedAnswer | Response:
    return await prepare_generate(checked) or loaded(checked)


_COMMON: dict[str, Any] = {"images": IMAGES, "any_type": True, "media_type": NDJSON, "ping": b""}
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


OPERATIONS = tuple(
    replace(operation, error=OllamaErrorResponse, name=operation.name or f"ollama_{operation.id}")
    for operation in (
        Operation("GET", "/api/version", models.version, "Get Ollama's API version", answer=VersionAnswer),
        Operation("GET", "/api/tags", models.tags, "List models (Ollama format)", answer=Tags),
        Operation(
            "GET",
            "/api/ps",
            models.running,
            "Show the loaded model (Ollama format)",
            answer=Running,
        ),
        Operation(
            "POST",
            "/api/show",
            models.show,
            "Show the model's details (Ollama format)",
            body=ShowRequest,
            answer=Show,
        ),
        answering("/api/chat", CHAT, "Create a chat answer (Ollama format)", ChatAnswer),
        answering("/api/generate", GENERATE, "Complete a prompt (Ollama format)", GenerateAnswer),
        answering("/api/embed", embed.EMBED, "Create embeddings (Ollama format)", EmbedAnswer),
        answering("/api/embeddings", embed.EMBEDDINGS, "Create one embedding (older Ollama format)", EmbeddingsAnswer),
        *(
            Operation(method, f"/api/{name}", not_built, f"Not supported: {name} is refused", name=f"ollama_{name}")
            for method, name in (
                ("POST", "pull"),
                ("POST", "push"),
                ("POST", "create"),
                ("POST", "copy"),
                ("DELETE", "delete"),
            )
        ),
    )
)
