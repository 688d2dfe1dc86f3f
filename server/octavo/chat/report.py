"""Report what a chat template shows of its model: calls, thoughts, switches, what a next turn finds cached. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from octavo.chat.earlier_thoughts import Turn, assigned, next_turn
from octavo.chat.options import ChatOptions
from octavo.chat.thoughts import thoughts_of
from octavo.chat.tools.choice import format_of
from octavo.chat.tools.harmony import speaks_harmony

_HARMONY_TAGS = ("<|channel|>analysis<|message|>", "<|end|>")


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
    thoughts = thoughts_of(template, options.thought_format)
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
        next_turn(template, thoughts, harmony, behind_tool=True),
        next_turn(template, thoughts, harmony),
    )


def tool_format(template: str, options: ChatOptions) -> str | None:
    """The name of the format of a template's calls; "generic" where nobody named it and the template has none, None
    where none is read."""
    if not options.reads_calls:
        return None
    if speaks_harmony(options, template):
        return "openai"
    found = format_of(template, options.call_format)
    return found.shown if options.call_format is None else found.parser


def in_words(report: ChatReport) -> dict[str, str]:
    """The report as lines for people, each behind its title."""
    told = "" if report.calls_told_by == "template" else "; a prompt of our own describes the tools"
    thoughts = " ... ".join(report.thoughts) + f" ({report.thoughts_how})" if report.thoughts else "none shown"
    lines = {"tool_calls": f"{report.calls} ({report.calls_how}{told})", "reasoning": thoughts}
    if report.thoughts:
        lines["by_default"] = "on" if report.thinks_by_default else "off"
        lines["on_by"] = assigned(report.thoughts_on)
        off = report.thoughts_off
        lines["off_by"] = "the prompt closes the thoughts; no switch" if off is None else assigned(off)
    lines["efforts"] = "; ".join(f"{name}: {', '.join(words)}" for name, words in report.efforts.items())
    for title, turn in (
        ("after_a_tool_result", report.after_a_tool_result),
        ("after_a_user_message", report.after_a_user_message),
    ):
        if turn is not None:
            kept = f" ({assigned(turn.kept_by)} keeps it)" if turn.kept_by else ""
            lines[title] = "the prompt is kept" if turn.keeps else f"the template {turn.why}{kept}"
    return lines
