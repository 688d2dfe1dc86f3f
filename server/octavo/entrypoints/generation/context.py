"""Conversations that are longer than the model's context: refused in the dialect's words, or cut at their beginning."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from octavo.chat.messages import Conversation
from octavo.entrypoints.errors import CONTEXT_LENGTH, APIError, bad_request, is_about_length
from octavo.errors import FieldError

T = TypeVar("T")
_CHAT_FIELD = ", or set truncate_prompt_tokens"  # which other dialects do not have


def is_too_long(error: Exception) -> bool:
    """Tell whether a request failed because its prompt has more tokens than fit."""
    if isinstance(error, APIError) and error.detail.code == CONTEXT_LENGTH:
        return True
    return is_about_length(str(error))


@contextmanager
def in_words_of(
    field: str | None = None, beginning: str = "prompt has", names: Mapping[str, str] = MappingProxyType({})
) -> Iterator[None]:
    """Errors are about the dialect's fields: ``names`` gives its own for OpenAI's and vLLM's, and without one for
    truncate_prompt_tokens none advises to set that. Those of prompts that are too long begin with ``beginning``, name
    ``field``, and have OpenAI's code for it."""
    try:
        yield
    except FieldError as error:
        raise _renamed_error(bad_request(error), names) from None
    except ValueError as error:
        if field is not None and is_too_long(error):
            message = _renamed(str(error), names).replace("prompt has", beginning, 1)
            raise bad_request(message, field, CONTEXT_LENGTH) from None
        if (message := _renamed(str(error), names)) == str(error):
            raise
        raise bad_request(message) from None
    except APIError as error:
        raise _renamed_error(error, names) from None


def _renamed_error(error: APIError, names: Mapping[str, str]) -> APIError:
    detail = error.detail
    detail.message, detail.param = _renamed(detail.message, names), names.get(detail.param or "", detail.param)
    return error


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Errors whose field is one of ``names``, at the beginning of its path, have the dialect's own name for it."""
    try:
        yield
    except FieldError as error:
        raise _with_own_field(bad_request(error), names) from None
    except ValueError as error:
        if (message := _with_field(str(error), names)) == str(error):
            raise
        raise bad_request(message, re.split(r"[ :]", message, maxsplit=1)[0]) from None
    except APIError as error:
        raise _with_own_field(error, names) from None


def _with_own_field(error: APIError, names: Mapping[str, str]) -> APIError:
    detail = error.detail
    detail.message = _with_field(detail.message, names)
    detail.param = detail.param and _with_field(detail.param, names)
    return error


def _with_field(text: str, names: Mapping[str, str]) -> str:
    """A message, or a path, that begins with a field."""
    found = re.match(r"\w+", text)
    return text if found is None else names.get(found[0], found[0]) + text[found.end() :]


def _renamed(message: str, names: Mapping[str, str]) -> str:
    if "truncate_prompt_tokens" not in names:
        message = message.replace(_CHAT_FIELD, "")
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), message) if names else message


def without_oldest(messages: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The messages without the ``count`` oldest ones but system prompts. The last stays, with the calls whose results
    it is a part of, and no result stays without its call."""
    last = len(messages) - 1
    while last > 0 and messages[last].get("role") == "tool":
        last -= 1
    kept, dropped = [], 0
    for at, message in enumerate(messages):
        if message.get("role") in ("system", "developer") or at >= last:
            kept.append(message)
        elif dropped < count or (message.get("role") == "tool" and not any(m.get("role") == "assistant" for m in kept)):
            dropped += 1
        else:
            kept.append(message)
    return kept


async def without_oldest_that_fits(conversation: Conversation, prepare: Callable[[Conversation], Awaitable[T]]) -> T:
    """Prepare a conversation without as few of its oldest messages as will do, found by bisection.
    Raises what it raises, where even what must stay is too long."""

    async def attempt(dropped: int) -> T | Exception:
        try:
            return await prepare(replace(conversation, messages=without_oldest(conversation.messages, dropped)))
        except (ValueError, APIError) as error:
            if not is_too_long(error):
                raise
            return error

    best = await attempt(0)
    low, high = 1, len(conversation.messages) - 1 if isinstance(best, Exception) else 0
    while low <= high:
        middle = (low + high) // 2
        found = await attempt(middle)
        if isinstance(found, Exception):
            low = middle + 1
        else:
            best, high = found, middle - 1
    if isinstance(best, Exception):
        raise best
    return best
