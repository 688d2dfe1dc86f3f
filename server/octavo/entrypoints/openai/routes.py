"""POST /v1/chat/completions and /v1/completions"""

from __future__ import annotations

from octavo.entrypoints.dialect import Dialect
from octavo.entrypoints.fields.values import IMAGES
from octavo.entrypoints.openai.answers import whole_chat_completion, whole_completion
from octavo.entrypoints.openai.events import ChatEvents, CompletionEvents
from octavo.entrypoints.openai.prepare import prepare_chat_completion, prepare_completion
from octavo.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

CHAT = Dialect(
    "create_chat_completion",
    ChatCompletionRequest,
    prepare_chat_completion,
    whole_chat_completion,
    ChatEvents,
    IMAGES,
)
COMPLETIONS = Dialect("create_completion", CompletionRequest, prepare_completion, whole_completion, CompletionEvents)
