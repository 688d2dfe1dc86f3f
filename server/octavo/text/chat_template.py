"""Chat templates: rendering a conversation into the prompt that a model was trained on.

Templates come from model repositories, so they run in a sandbox with bounds and see nothing but plain JSON values. Its
environment is the one that templates are written for (transformers' `apply_chat_template`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template, nodes

# Stands at the end of a message that is to be continued; the space tells whether the template strips messages.
_MARK = "\ue000octavo-end-of-message\ue001 "


# The arguments of `render`, which a template's further variables cannot replace.
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)


# Length of an error, in which a template may write what it likes.
_MAX_WORDS = 2000


class ChatTemplateError(ValueError):
    """The template refused the conversation or is broken."""


class TemplateLimitError(ChatTemplateError):
    """The template uses more steps, bytes or time than a rendering may."""


def check_variables(variables: Mapping[str, Any], field: str) -> None:
    """Raises ValueError when ``variables`` for a template, which ``field`` holds, replace one of `render`'s own."""
    if reserved := sorted(RESERVED & variables.keys()):
        raise ValueError(f"{field} must not hold {', '.join(reserved)}: give each as an option of its own")


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    /,  # variables may have any name
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """The prompt. ``continue_final_message`` leaves the last message open, for the model to go on with it.

    Raises ChatTemplateError (a ValueError) with the template's own words when it refuses the conversation,
    TemplateLimitError when it takes too much for it.
    """
    from jinja2 import TemplateError

    from octavo.text.template_meter import Meter, UsedUpError, given_meter, metered, weight_of

    if continue_final_message and add_generation_prompt:
        raise ChatTemplateError("continue_final_message and add_generation_prompt cannot both be set")
    chat = [_plain(message) for message in messages]
    if continue_final_message:
        _mark_end(chat)
    values = {
        **{name: _plain(value) for name, value in variables.items()},
        "messages": chat,
        "tools": _plain(tools),
        "documents": _plain(documents),
        "add_generation_prompt": add_generation_prompt,
    }
    given = given_meter()
    meter = given or Meter(lambda: weight_of(values, sys.maxsize))
    try:
        if given is not None:
            text = _compile(template).render(values)
        else:
            with metered(meter):
                text = _compile(template).render(values)
    except ChatTemplateError:
        raise
    except Exception as error:  # a template is a program of the model's author: it may raise anything
        if meter.why is not None or isinstance(error, UsedUpError):
            raise _limit_error(meter.why or str(error)) from None
        how = "refused" if isinstance(error, TemplateError) else "failed on"
        raise ChatTemplateError(f"the chat template {how} the messages: {str(error)[:_MAX_WORDS]}") from None
    if meter.why is not None:
        raise _limit_error(meter.why)
    return _cut_at_mark(text) if continue_final_message else text


def _limit_error(why: str) -> TemplateLimitError:
    return TemplateLimitError(
        f"the chat template {why} with these messages, tools and variables; send fewer or shorter ones, or use another "
        "template"
    )


def _mark_end(chat: list[Any]) -> None:
    last = chat[-1] if chat else None
    content = last.get("content") if isinstance(last, dict) else None
    if isinstance(last, dict) and isinstance(content, str):
        last["content"] = content + _MARK
        return
    for part in reversed(content or []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += _MARK
            return
    raise ChatTemplateError("continue_final_message needs a last message with text to continue")


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_MARK.rstrip())
    if at < 0:
        raise ChatTemplateError("the chat template drops or changes the last message, so it cannot be continued")
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()


def _plain(value: Any) -> Any:
    """``value`` made of plain JSON types: objects with methods have no business in a sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    for kind in (str, int, float):  # subclasses, enums among them
        if isinstance(value, kind):
            return kind(value.value) if hasattr(value, "value") else kind(value)
    if hasattr(value, "model_dump"):
        return _plain(value.model_dump())
    raise ChatTemplateError(f"chat messages are made of JSON values, got {type(value).__name__}")


def parse(template: str) -> nodes.Template:
    """The template's syntax tree. Raises jinja2.TemplateSyntaxError, UsedUpError."""
    from octavo.text.bounded_sandbox import environment

    return environment().parse_checked(template)


@lru_cache(maxsize=64)
def _compile(template: str) -> Template:
    from jinja2 import TemplateSyntaxError

    from octavo.text.bounded_sandbox import environment

    try:
        return environment().from_string(parse(template))
    except TemplateSyntaxError as error:
        raise ChatTemplateError(f"the chat template is broken at line {error.lineno}: {error.message}") from None
    except (RecursionError, SyntaxError, MemoryError):  # of Python's compiler
        raise ChatTemplateError("the chat template nests expressions or blocks too deeply") from None
