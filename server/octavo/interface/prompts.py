"""Prompts as dictionaries, under vLLM's names."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt of text. ``multi_modal_data``: {"image": a PIL image, or a list of them}."""

    prompt: str
    multi_modal_data: NotRequired[dict[str, Any]]
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt of token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    cache_salt: NotRequired[str]


PromptType = str | TextPrompt | TokensPrompt | list[int]
