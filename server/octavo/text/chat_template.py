"""Chat templates: rendering a conversation into the prompt that a model was trained on.

Templates come from model repositories, so they run in jinja2's immutable sandbox and see nothing but plain JSON values.
The environment is the one that templates are written for (transformers' `apply_chat_template`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment, Template, nodes

# Stands at the end of a message that is to be continued; the space tells whether the template strips messages.
_MARK = "\ue000octavo-end-of-message\ue001 "


# The arguments of `render`, which a template's further variables cannot replace.
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)


class ChatTemplateError(ValueError):
    """The template refused the conversation or is broken."""


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

    Raises ChatTemplateError (a ValueError) with the template's own words when it refuses the conversation.
    """
    from jinja2 import TemplateError

    if continue_final_message and add_generation_prompt:
        raise ChatTemplateError("continue_final_message and add_generation_prompt cannot both be set")
    compiled = _compile(template)
    try:
        chat = [_plain(message) for message in messages]
        if continue_final_message:
            _mark_end(chat)
        text = compiled.render({
            **{name: _plain(value) for name, value in variables.items()},
            "messages": chat, "tools": _plain(tools), "documents": _plain(documents),
            "add_generation_prompt": add_generation_prompt,
        })  # fmt: skip
    except ChatTemplateError:
        raise
    except TemplateError as error:
        raise ChatTemplateError(f"the chat template refused the messages: {error}") from None
    except Exception as error:  # a template is a program of the model's author: it may raise anything
        raise ChatTemplateError(f"the chat template failed on the messages: {error}") from None
    return _cut_at_mark(text) if continue_final_message else text


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
    """The template's syntax tree. Raises jinja2.TemplateSyntaxError."""
    return _environment().parse(template)


@lru_cache(maxsize=64)
def _compile(template: str) -> Template:
    from jinja2 import TemplateSyntaxError

    try:
        return _environment().from_string(template)
    except TemplateSyntaxError as error:
        raise ChatTemplateError(f"the chat template is broken at line {error.lineno}: {error.message}") from None


@lru_cache(maxsize=1)
def _environment() -> Environment:
    import jinja2.ext
    import jinja2.nodes
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks the assistant's part for training; here it is its body."""

        tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

        def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    # jinja2's own filter escapes < > & for HTML, which would change the prompt
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
