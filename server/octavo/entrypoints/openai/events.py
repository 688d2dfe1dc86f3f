"""What the streams of completions and chat completions share: usage, errors and the end."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from octavo.entrypoints.errors import APIError, ErrorResponse
from octavo.entrypoints.openai.answers import Usage
from octavo.entrypoints.openai.protocol import GenerationRequest
from octavo.entrypoints.state import ServerState
from octavo.entrypoints.transport.sse import event

DONE = b"data: [DONE]\n\n"


class ChunkEvents:
    """Whether a stream ends with its usage, and whether each of its chunks has it, as in vLLM."""

    def __init__(self, state: ServerState, body: GenerationRequest) -> None:
        forced, options = state.args.enable_force_include_usage, body.stream_options
        self.include_usage = forced or (options is not None and bool(options.include_usage))
        continuous = options is not None and bool(options.continuous_usage_stats)
        self.continuous_usage = forced or (self.include_usage and continuous)
        self.no_usage: UnsetType | None = None if self.include_usage else UNSET

    def usage(self) -> Usage:
        """The usage so far."""
        raise NotImplementedError

    def chunk_usage(self) -> Usage | UnsetType | None:
        """The usage field of a chunk with content."""
        return self.usage() if self.continuous_usage else self.no_usage

    def error(self, error: APIError) -> bytes:
        """An error event, and the end."""
        return event(ErrorResponse(error.detail)) + DONE
