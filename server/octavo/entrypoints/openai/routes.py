"""POST /v1/chat/completions and /v1/completions"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.dialect import Dialect, respond
from octavo.entrypoints.fields.values import IMAGES
from octavo.entrypoints.openai.answers import whole_chat_completion, whole_completion
from octavo.entrypoints.openai.events import ChatEvents, CompletionEvents
from octavo.entrypoints.openai.prepare import prepare_chat_completion, prepare_completion
from octavo.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

CHAT = Dialect(ChatCompletionRequest, prepare_chat_completion, whole_chat_completion, ChatEvents, IMAGES)
COMPLETIONS = Dialect(CompletionRequest, prepare_completion, whole_completion, CompletionEvents)


async def create_chat_completion(request: Request) -> Response:
    """Handle POST /v1/chat/completions."""
    return await respond(request, CHAT)


async def create_completion(request: Request) -> Response:
    """Handle POST /v1/completions."""
    return await respond(request, COMPLETIONS)
