"""The served models as Anthropic's clients list them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from msgspec import Struct


class AnthropicModel(Struct):
    """One name of the served model."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    lifecycle: str = "active"
    type: str = "model"


class AnthropicModels(Struct):
    """A page of them."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def anthropic_model(name: str, created: int, max_model_len: int) -> AnthropicModel:
    """``created``: seconds since the epoch; ``max_model_len``: tokens of prompt and answer together."""
    moment = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    return AnthropicModel(name, name, moment, max_model_len - 1, max_model_len - 1)


def page_of(models: Sequence[AnthropicModel]) -> AnthropicModels:
    """All models: one page."""
    return AnthropicModels(list(models), False, models[0].id, models[-1].id)
