"""Limits of thoughts: what ends the thoughts of an answer that has used up its tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from octavo.chat.messages import Conversation
from octavo.chat.structured import MARKS
from octavo.chat.thought_tags import THINK, ThoughtTags
from octavo.errors import FieldError
from octavo.interface.thoughts import ThoughtBudget
from octavo.text.chat_template import ChatTemplateError
from octavo.text.messages import REASONING

_USER = {"role": "user", "content": "Is it so?"}
_THOUGHT, _ANSWER = "I wonder about it.", "It is so."
_SPOKEN: dict[str, Any] = {"role": "assistant", "content": _ANSWER, **dict.fromkeys((*REASONING, "thinking"), _THOUGHT)}
_IN_TEMPLATE = "thinking_budget"  # the variable of templates that tell the model of its budget


def budget_of(conversation: Conversation) -> tuple[int, bool] | None:
    """The tokens that an answer may think, and whether they are a hint (`Conversation.budget_is_hint`), as a template's
    own variable is; None: no limit."""
    asked, is_hint = conversation.budget, conversation.budget_is_hint
    if asked is None:
        asked, is_hint = (conversation.chat_template_kwargs or {}).get(_IN_TEMPLATE), True
    if not isinstance(asked, int) or isinstance(asked, bool) or asked < 0:
        return None
    return asked, is_hint


def closing_of(tags: ThoughtTags, text_of: Callable[[list[dict[str, Any]]], str]) -> str:
    """The text with which a template ends thoughts, the line breaks around its tag included. ``text_of`` renders
    messages."""
    with suppress(ChatTemplateError, FieldError):
        between = text_of([_USER, _SPOKEN]).partition(_THOUGHT)[2].partition(_ANSWER)[0]
        if closing := closing_in(tags, between):
            return closing
    return f"\n{tags.closing}\n\n" if tags.closing == THINK.closing else tags.closing


def closing_in(tags: ThoughtTags, between: str) -> str:
    """The closing tag with the line breaks around it, in what a template writes behind thoughts; "" for none."""
    gap, tag, behind = between.partition(tags.closing)
    return gap + tag + behind[: len(behind) - len(behind.lstrip())] if tag and not gap.strip() else ""


def make_budget(
    num_tokens: int, tags: ThoughtTags | None, begun: bool, closing: str, encode: Callable[[str], list[int]]
) -> ThoughtBudget:
    """A limit of thoughts. ``begun``: the prompt has opened them; ``closing`` ends them. Raises ValueError for a model
    whose thoughts nobody can tell from text by its tokens."""
    if tags is None:
        raise ValueError("needs a chat template that writes thoughts between tags, and this model's does not; drop it")
    ends = encode(tags.closing)
    if not any(encode(mark) == [token] for mark in MARKS.findall(tags.closing) for token in ends):
        raise ValueError(f"needs a model whose tag {tags.closing} is a token; this one's is text. Drop it")
    return ThoughtBudget(num_tokens, encode(closing), ends, [] if begun else encode(tags.opening))
