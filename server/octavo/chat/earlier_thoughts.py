"""Find out by rendering what a chat template's next turn loses, and which variables keep earlier thoughts. Pure."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from octavo.chat.thought_tags import ThoughtTags
from octavo.chat.thoughts import Thoughts, thoughts_of
from octavo.chat.tools.choice import with_arguments_as_text
from octavo.chat.tools.harmony import harmony_messages
from octavo.text.chat_template import ChatTemplateError, render
from octavo.text.content_format import with_parts
from octavo.text.messages import REASONING, for_template

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]

# Variables of some templates with their values that keep the thoughts of earlier turns, and that drop them.
_VARIABLES: dict[str, tuple[Any, Any]] = {
    "preserve_thinking": (True, False),
    "preserved_thinking": (True, False),
    "keep_past_thinking": (True, False),
    "clear_thinking": (False, True),
    "truncate_history_thinking": (False, True),
    "think_render_option": ("all", "lastthink"),
}
DROPS = "drops earlier thoughts"
# Limits of all renderings that look for these: a few messages take a thousandth of them.
_PROBE_STEPS, _PROBE_BYTES = 3_000_000, 32 << 20
_THOUGHT = "So I look it up."
_CALL = {"id": "callnum00", "type": "function", "function": {"name": "look_up", "arguments": {"text": "a"}}}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "look_up",
            "parameters": {"type": "object", "properties": {"text": {"type": "string", "description": "text"}}},
        },
    }
]


@dataclass(frozen=True)
class Turn:
    """The parts of a prompt and its answer with which the next prompt begins, so that they are found in the cache."""

    keeps: bool
    why: str = ""  # what is lost
    kept_by: Mapping[str, Any] = field(default_factory=dict)  # variables with which nothing is


@dataclass(frozen=True)
class EarlierThoughts:
    """Variables for a template's own way of treating thoughts of earlier turns, where they change it."""

    keep: Mapping[str, Any] = field(default_factory=dict)  # none: they stay anyway, or no variable keeps them
    drop: Mapping[str, Any] = field(default_factory=dict)  # none: they go anyway, or no variable drops them

    def variables(self, preserve: str, wish: bool | None) -> Mapping[str, Any]:
        """The variables of a request that wants earlier thoughts kept or dropped (None: it does not say), where the
        server's option is ``preserve``, one of `octavo.chat.options.PRESERVE`."""
        kept = preserve == "always" or (preserve == "auto" and wish is not False)
        return self.keep if kept else self.drop


@lru_cache(maxsize=64)
def earlier_thoughts_of(template: str, flag: str | ThoughtTags | None = None) -> EarlierThoughts:
    """Return the variables by which a template keeps or drops earlier thoughts, and log it once. ``flag``: the name of
    a format of thoughts that overrides the template's."""
    named = [name for name in _VARIABLES if re.search(rf"\b{name}\b", template)]
    if not named:
        return EarlierThoughts()
    from octavo.text.template_meter import Meter, metered

    with metered(Meter(steps=_PROBE_STEPS, size=_PROBE_BYTES)) as meter:
        found = _found(template, thoughts_of(template, flag), named)
    if meter.why is not None:
        logger.warning("chat template: it %s for a few messages, so no variable of earlier thoughts is set", meter.why)
        return EarlierThoughts()
    if found.keep:
        logger.info("chat template: earlier thoughts stay in the prompt by %s", assigned(found.keep))
    return found


def warn_where_lost(template: str, flag: str | ThoughtTags | None = None) -> None:
    """Log it if a template drops earlier thoughts whatever its variables are."""
    turn = next_turn(template, thoughts_of(template, flag))
    if turn is not None and turn.why == DROPS and not turn.kept_by:
        logger.warning(
            "chat template: it drops thoughts of earlier turns and no variable keeps them, so --preserve-reasoning "
            "always cannot either; --chat-template takes another template"
        )


def _found(template: str, thoughts: Thoughts, named: list[str]) -> EarlierThoughts:
    turn = next_turn(template, thoughts)
    if turn is None or not turn.keeps:
        return EarlierThoughts(keep=turn.kept_by if turn is not None else {})
    for name in named:
        variables = {name: _VARIABLES[name][1]}
        if (dropped := _compared(template, thoughts, False, False, variables)) is not None and not dropped.keeps:
            return EarlierThoughts(drop=variables)
    return EarlierThoughts()


def assigned(variables: Mapping[str, Any]) -> str:
    """Variables and their values in words."""
    return ", ".join(f"{name}={str(value).lower()}" for name, value in variables.items())


def next_turn(template: str, thoughts: Thoughts, harmony: bool = False, behind_tool: bool = False) -> Turn | None:
    """Return what the turn behind a user's message, or a tool's result, keeps of the turns before it; None where the
    template refuses such turns."""
    found = _compared(template, thoughts, harmony, behind_tool, {})
    if found is None or found.keeps:
        return found
    for name, (value, _) in _VARIABLES.items():
        if re.search(rf"\b{name}\b", template):
            kept = _compared(template, thoughts, harmony, behind_tool, {name: value})
            if kept is not None and kept.keeps:
                return Turn(False, found.why, {name: value})
    return found


def _compared(
    template: str, thoughts: Thoughts, harmony: bool, behind_tool: bool, variables: Mapping[str, Any]
) -> Turn | None:
    thought = dict.fromkeys((*REASONING, "thinking"), _THOUGHT)
    user = {"role": "user", "content": "Look it up."}
    answers: Messages = [
        {"role": "assistant", "content": "", **thought, "tool_calls": [_CALL]},
        {"role": "tool", "name": "look_up", "tool_call_id": _CALL["id"], "content": "found"},
    ]
    if not behind_tool:
        answers.append({"role": "assistant", "content": "It is there.", **thought})
    asked = [user] if behind_tool else [user, *answers[:2]]
    last = answers[0] if behind_tool else answers[2]
    following = answers[1] if behind_tool else {"role": "user", "content": "And now?"}

    def text_of(messages: Messages, opens: bool, as_text: bool) -> str:
        messages = [with_arguments_as_text(message) for message in messages] if as_text else messages
        messages = harmony_messages(messages) if harmony else for_template(messages, template)
        return render(
            template,
            with_parts(messages, template, ""),
            tools=_TOOLS,
            add_generation_prompt=opens,
            bos_token="",
            eos_token="",
            **{**thoughts.switches.on, **variables},
        )

    for as_text in (False, True):  # the arguments of calls, which some templates take only so
        with suppress(ChatTemplateError):
            prompt, spoken = text_of(asked, True, as_text), text_of([*asked, last], False, as_text)
            after = text_of([*asked, last, following], True, as_text)
            if not after.startswith(prompt):
                return Turn(False, _why(prompt, after, thoughts))
            if not after.startswith(spoken.rstrip()):
                return Turn(False, _why(spoken, after, thoughts))
            return Turn(True)
    return None


def _why(before: str, after: str, thoughts: Thoughts) -> str:
    if _THOUGHT in before and after.count(_THOUGHT) < before.count(_THOUGHT):
        return DROPS
    tags = thoughts.tags
    if tags is not None and before.rstrip().endswith((*tags.openings, *tags.closings)):
        return "drops the tags of thoughts that the prompt wrote"
    return "writes earlier messages anew"
