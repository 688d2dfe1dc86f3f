"""OpenAI's fields that say what of a prompt is to be found in the cache again, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from octavo.chat.breakpoints import MOST, mark
from octavo.entrypoints.errors import bad_request, shown

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_OF_KEY = 300.0  # seconds: who names conversations that belong together goes on with them
_DAY = 86_400.0
BREAKPOINT = "prompt_cache_breakpoint"
Ttl = Annotated[str, Field(pattern="^[1-9][0-9]{0,4}[smh]$")]


class PromptCacheOptions(BaseModel):
    """The whole prompt is to be found again, ``ttl`` (30m) after each use, unless ``mode`` is "explicit"."""

    model_config = ConfigDict(strict=True, extra="ignore")

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Ttl | None = None
    prewarm: Literal[False] | None = None


class PromptCacheBreakpoint(BaseModel):
    """The prompt up to the end of this part is to be found again. ``ttl``: that of the request's options, if none."""

    model_config = ConfigDict(strict=True, extra="ignore")

    mode: Literal["explicit"]
    ttl: Ttl | None = None


class CachedPrompt(Protocol):
    """A body with these fields."""

    prompt_cache_key: str | None
    prompt_cache_options: PromptCacheOptions | None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None


def whole_seconds(body: CachedPrompt, has_breakpoints: bool) -> float:
    """The time for which the whole prompt is to be found again; 0 for no wish."""
    options, wishes = body.prompt_cache_options, [0.0]
    if options is None:
        wishes += [_OF_KEY] if body.prompt_cache_key else []
        wishes += [_default(body)] if has_breakpoints else []
    elif options.mode != "explicit":
        wishes.append(_default(body))
    if body.prompt_cache_retention == "24h":
        wishes.append(_DAY)
    return max(wishes)


def breakpoint_seconds(body: CachedPrompt, given: PromptCacheBreakpoint) -> float:
    """The time for which the prompt up to a breakpoint is to be found again."""
    return _seconds(given.ttl) if given.ttl is not None else _default(body)


def _default(body: CachedPrompt) -> float:
    options = body.prompt_cache_options
    return _seconds(options.ttl if options is not None and options.ttl is not None else "30m")


def _seconds(ttl: str) -> float:
    return int(ttl[:-1]) * _UNITS[ttl[-1]]


def latest(body: CachedPrompt, seconds: Sequence[float]) -> list[float]:
    """The times of the breakpoints in order, 0 for those that are too many: the last ones count, and the prompt's end
    if that is one."""
    options = body.prompt_cache_options
    most = MOST if options is not None and options.mode == "explicit" else MOST - 1
    return [time if number >= len(seconds) - most else 0.0 for number, time in enumerate(seconds)]


def marked(body: CachedPrompt, messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[float]]:
    """The messages of a chat, not checked yet, with marks at their breakpoints, and the time of each. Raises APIError
    naming the part."""
    found, seconds = list(messages), list[float]()
    for at, message in enumerate(messages):
        parts = message.get("content")
        if not isinstance(parts, list) or not any(isinstance(part, dict) and BREAKPOINT in part for part in parts):
            continue
        copy = list[Any]()
        for number, part in enumerate(parts):
            given = part.get(BREAKPOINT) if isinstance(part, dict) else None
            if given is None:
                copy.append(part)
                continue
            text = mark(len(seconds))
            seconds.append(breakpoint_seconds(body, _read(given, f"messages.{at}.content.{number}.{BREAKPOINT}")))
            is_text = isinstance(part.get("text"), str)
            copy += [{**part, "text": part["text"] + text}] if is_text else [part, {"type": "text", "text": text}]
        found[at] = {**message, "content": copy}
    return found, latest(body, seconds)


def _read(given: Any, where: str) -> PromptCacheBreakpoint:
    try:
        return PromptCacheBreakpoint.model_validate(given)
    except ValidationError:
        raise bad_request(
            f'{where} must be {{"mode": "explicit"}}, with a ttl such as "30m" or without, got {shown(given)}', where
        ) from None
