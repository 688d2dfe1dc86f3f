"""POST /v1/messages and /v1/messages/count_tokens"""

from __future__ import annotations

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.anthropic.answers import AnthropicMessage, TokenCount, UneditedCount, whole
from octavo.entrypoints.anthropic.events import PING, MessageEvents
from octavo.entrypoints.anthropic.prepare import count_tokens, prepare
from octavo.entrypoints.anthropic.protocol import IMAGES, CountTokensRequest, MessagesRequest
from octavo.entrypoints.dialect import Dialect, read_request
from octavo.entrypoints.errors import AnthropicErrorResponse
from octavo.entrypoints.operation import Operation, answering
from octavo.entrypoints.transport.responses import JSON

MESSAGES = Dialect("create_message", MessagesRequest, prepare, whole, MessageEvents, IMAGES, ping=PING)


async def count_message_tokens(request: Request) -> Response:
    """Handle POST /v1/messages/count_tokens."""
    checked = await read_request(request, CountTokensRequest, IMAGES)
    management = checked.body.context_management
    edits = management is not None and management.clears
    count, original = await count_tokens(checked)
    return JSON(TokenCount(count, UneditedCount(original) if edits else UNSET))


OPERATIONS = (
    answering(
        "/v1/messages",
        MESSAGES,
        "Create a message (Anthropic format)",
        AnthropicMessage,
        error=AnthropicErrorResponse,
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        count_message_tokens,
        "Count input tokens (Anthropic format)",
        body=CountTokensRequest,
        answer=TokenCount,
        error=AnthropicErrorResponse,
    ),
)
