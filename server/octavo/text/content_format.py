"""Detect whether a chat template reads a message's content as a text or as a list of parts."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2.nodes import Node

PARTS = "_parts"  # of a message with images: texts and images as they follow one another; its content is their text


@lru_cache(maxsize=64)
def iterates_over_content(template: str) -> bool:
    """Return whether the template loops over a message's content: it then takes a list of parts (``{"type": "text",
    "text"}``, ``{"type": "image"}``). False for a template that is broken or too large."""
    from jinja2 import TemplateSyntaxError, nodes

    from octavo.text.chat_template import parse
    from octavo.text.template_meter import Meter, UsedUpError, metered

    try:
        with metered(Meter()):  # of its own: what is found is kept
            tree = parse(template)
    except (TemplateSyntaxError, UsedUpError):
        return False
    names = {"content"}  # of macros' arguments, and of variables that hold a content

    def is_content(node: Node | None) -> bool:
        if isinstance(node, nodes.Name):
            return node.name in names
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return isinstance(node, nodes.Filter) and is_content(node.node)

    for assigned in tree.find_all(nodes.Assign):
        if is_content(assigned.node) and isinstance(assigned.target, nodes.Name):
            names.add(assigned.target.name)
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))


def takes_text_too(template: str) -> bool:
    """Return whether a template that loops over contents first checks for a text."""
    return "is string" in template or "is not string" in template or "is iterable" in template


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The first message with the content of the second behind its own, images included."""
    if PARTS not in first and PARTS not in second:
        return {**first, "content": f"{first['content']}\n\n{second['content']}"}
    parts = [*_parts(first), *_parts(second)]
    return {**first, "content": "\n".join(part for part in parts if isinstance(part, str)), PARTS: parts}


def _parts(message: dict[str, Any]) -> list[Any]:
    """The parts of a message, with what was written around them into its content."""
    content, parts = message["content"], message.get(PARTS, ())
    text = "\n".join(part for part in parts if isinstance(part, str))
    before, _, after = content.partition(text) if text else (content, "", "")
    return [part for part in (before.rstrip("\n"), *parts, after.lstrip("\n")) if part != ""]


def with_parts(messages: list[dict[str, Any]], template: str, image_text: str) -> list[dict[str, Any]]:
    """The messages with contents as the template reads them: lists of parts where it loops over them, else texts in
    which ``image_text`` stands for an image. What is no text among a message's `PARTS` is an image."""
    as_list = iterates_over_content(template)
    wraps = as_list and not takes_text_too(template)
    found = []
    for message in messages:
        if PARTS in message:
            parts = _parts(message)
        elif wraps and message["content"]:
            parts = [message["content"]]
        else:
            found.append(message)
            continue
        kept = {key: value for key, value in message.items() if key != PARTS}
        if as_list:
            kept["content"] = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts
            ]
        else:
            kept["content"] = "\n".join(part if isinstance(part, str) else image_text for part in parts)
        found.append(kept)
    return found
