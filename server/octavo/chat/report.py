"""Report what a chat template shows of its model: calls, thoughts, switches, what a next turn finds cached. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from octavo.chat.options import ChatOptions
from octavo.chat.thoughts import Thoughts, thoughts_of
from octavo.chat.tools.choice import format_of
from octavo.chat.tools.harmony import harmony_messages, speaks_harmony
from octavo.text.chat_template import ChatTemplateError, render
from octavo.text.content_format import with_parts
from octavo.text.messages import REASONING, for_template

Messages = list[dict[str, Any]]

_HARMONY_TAGS = ("<|channel|>analysis<|message|>", "<|end|>")
# Variables by which some templates keep the thoughts of earlier turns.
_KEEPING: tuple[dict[str, Any], ...] = (
    {"preserve_thinking": True},
    {"preserved_thinking": True},
    {"keep_past_thinking": True},
    {"clear_thinking": False},
    {"truncate_history_thinking": False},
    {"think_render_option": "all"},
)
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
class ChatReport:
    """The formats of a chat template, and how they were found."""

    calls: str  # the row of the table of formats
    calls_how: str  # "read back", "described", "flag", "generic"
    calls_told_by: str  # "template", or "prompt": one of our own
    thoughts: tuple[str, str] | None  # tags
    thoughts_how: str
    thinks_by_default: bool
    thoughts_on: Mapping[str, Any]  # variables
    thoughts_off: Mapping[str, Any] | None  # None: no switch; the prompt closes the thoughts
    efforts: Mapping[str, Sequence[str]]
    after_a_tool_result: Turn | None  # None: the template refuses such turns
    after_a_user_message: Turn | None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def chat_report(template: str, options: ChatOptions | None = None) -> ChatReport:
    """The report of a template. ``options``: flags that override what it shows."""
    options = options or ChatOptions()
    harmony = speaks_harmony(options, template)
    calls = format_of(template, options.call_format)
    if harmony:
        calls = replace(calls, parser="openai", how="described" if calls.generic else calls.how, told=True)
    thoughts = thoughts_of(template, options.reasoning_parser)
    tags = _HARMONY_TAGS if harmony else thoughts.tags.around if thoughts.tags is not None else None
    switches = thoughts.switches
    return ChatReport(
        calls.parser,
        calls.how,
        "template" if calls.told else "prompt",
        tags,
        "harmony" if harmony else thoughts.how,
        bool(tags) and switches.by_default,
        dict(switches.on) if tags else {},
        None if not tags or switches.off is None else dict(switches.off),
        switches.efforts,
        _next_turn(template, thoughts, harmony, behind_tool=True),
        _next_turn(template, thoughts, harmony, behind_tool=False),
    )


def in_words(report: ChatReport) -> dict[str, str]:
    """The report as lines for people, each behind its title."""
    told = "" if report.calls_told_by == "template" else "; a prompt of our own describes the tools"
    thoughts = " ... ".join(report.thoughts) + f" ({report.thoughts_how})" if report.thoughts else "none shown"
    lines = {"tool_calls": f"{report.calls} ({report.calls_how}{told})", "reasoning": thoughts}
    if report.thoughts:
        lines["by_default"] = "on" if report.thinks_by_default else "off"
        lines["on_by"] = _assigned(report.thoughts_on)
        off = report.thoughts_off
        lines["off_by"] = "the prompt closes the thoughts; no switch" if off is None else _assigned(off)
    lines["efforts"] = "; ".join(f"{name}: {', '.join(words)}" for name, words in report.efforts.items())
    for title, turn in (
        ("after_a_tool_result", report.after_a_tool_result),
        ("after_a_user_message", report.after_a_user_message),
    ):
        if turn is not None:
            kept = f" ({_assigned(turn.kept_by)} keeps it)" if turn.kept_by else ""
            lines[title] = "the prompt is kept" if turn.keeps else f"the template {turn.why}{kept}"
    return lines


def _assigned(variables: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={str(value).lower()}" for name, value in variables.items())


def _next_turn(template: str, thoughts: Thoughts, harmony: bool, behind_tool: bool) -> Turn | None:
    """Return what the turn behind a tool's result, or a user's message, keeps of the turns before it."""
    found = _compared(template, thoughts, harmony, behind_tool, thoughts.switches.on)
    if found is None or found.keeps:
        return found
    for variables in _KEEPING:
        if re.search(rf"\b{next(iter(variables))}\b", template):
            kept = _compared(template, thoughts, harmony, behind_tool, {**thoughts.switches.on, **variables})
            if kept is not None and kept.keeps:
                return Turn(False, found.why, variables)
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

    def text_of(messages: Messages, opens: bool) -> str:
        messages = harmony_messages(messages) if harmony else for_template(messages, template)
        return render(
            template,
            with_parts(messages, template, ""),
            tools=_TOOLS,
            add_generation_prompt=opens,
            bos_token="",
            eos_token="",
            **variables,
        )

    with suppress(ChatTemplateError):
        prompt, spoken = text_of(asked, True), text_of([*asked, last], False)
        after = text_of([*asked, last, following], True)
        if not after.startswith(prompt):
            return Turn(False, _why(prompt, after, thoughts))
        if not after.startswith(spoken.rstrip()):
            return Turn(False, _why(spoken, after, thoughts))
        return Turn(True)
    return None


def _why(before: str, after: str, thoughts: Thoughts) -> str:
    if _THOUGHT in before and after.count(_THOUGHT) < before.count(_THOUGHT):
        return "drops earlier thoughts"
    tags = thoughts.tags
    if tags is not None and before.rstrip().endswith((*tags.openings, *tags.closings)):
        return "drops the tags of thoughts that the prompt wrote"
    return "writes earlier messages anew"
