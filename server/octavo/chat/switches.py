"""Variables of a chat template that switch thoughts on and off and set their effort, found by rendering. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Variables = Mapping[str, Any]
# Renders a user's message with variables, and opens the answer; None where the template refuses them.
RenderPrompt = Callable[[Variables], str | None]

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SWITCHES = ("enable_thinking", "thinking", "reasoning")  # true or false
_MODE = "thinking_mode"
_BUDGET = "thinking_budget"
_EFFORT_NAMES = ("reasoning_effort", "thinking_effort", "reasoning_strength")
_NO_EFFORT = ("none", "no_think", "minimal", "low")  # words that some templates take for "without thoughts"
_FULL_EFFORT = ("high", "medium", "max")
_LOW = "low_effort"


@dataclass(frozen=True)
class Switches:
    """The ways in which a request has a template's model think."""

    by_default: bool = True
    on: Variables = field(default_factory=dict)
    off: Variables | None = None  # None: the template cannot
    efforts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # the words that each variable accepts
    has_low: bool = False  # the template knows a low effort as a variable of its own

    def variables(self, thinking: bool | None, effort: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a request's wishes as variables: those that an effort only implies, and those that it asks for.
        ``thinking``: None where the request does not say."""
        wished: dict[str, Any] = {}
        implied = dict(self.on) if thinking is None and effort not in (None, "none") else {}
        if thinking is None and effort == "none":
            wished |= self.off or {}
        elif thinking is not None:
            wished |= dict.fromkeys(_SWITCHES[:2], thinking) | dict((self.on if thinking else self.off) or {})
        if effort is None:
            return implied, wished
        for name, accepted in self.efforts.items():
            if effort != "none" or "none" in accepted:
                wished[name] = nearest(effort, accepted)
        if "reasoning_effort" not in self.efforts:
            wished.setdefault("reasoning_effort", effort)
        if self.has_low and effort in ("minimal", "low"):
            wished[_LOW] = True
        return implied, wished


def nearest(effort: str, accepted: tuple[str, ...]) -> str:
    """The accepted effort that is the nearest; of two, the higher."""
    if effort in accepted or effort not in EFFORTS:
        return effort
    at = EFFORTS.index(effort)
    known = [word for word in accepted if word in EFFORTS and word != "none"]
    return min(known, key=lambda word: (abs(EFFORTS.index(word) - at), -EFFORTS.index(word)), default=effort)


def find_switches(template: str, prompt: RenderPrompt, closed: Callable[[str], bool]) -> Switches:
    """The switches of a template. ``closed`` tells whether a prompt's end has closed the thoughts."""
    base = prompt({})
    if base is None:
        return Switches()
    on: dict[str, Any] = {}
    off: dict[str, Any] = {}
    by_default = not closed(base)
    for name in _mentioned(template, _SWITCHES):
        with_it, without = prompt({name: True}), prompt({name: False})
        if with_it is not None and without is not None and with_it != without:
            by_default = by_default if on else base != without
            on[name], off[name] = True, False
    for name, of_on, of_off in ((_MODE, "enabled", "disabled"), (_BUDGET, None, 0)):
        if not off and _mentioned(template, (name,)) and prompt({name: of_off}) not in (None, base):
            off[name] = of_off
            on |= {name: of_on} if of_on is not None else {}
    efforts, texts = dict[str, tuple[str, ...]](), {}
    for name in _mentioned(template, _EFFORT_NAMES):
        told = {word: prompt({**on, name: word}) for word in {*EFFORTS, *_NO_EFFORT}}
        found = {word: text for word, text in told.items() if text is not None}
        if len({*found.values(), prompt(on)}) > 1 or len(found) < len(told):
            efforts[name] = tuple(word for word in EFFORTS if word in found)
            texts[name] = found
    for name, found in texts.items():
        if not off and (word := next((word for word in _NO_EFFORT if closed(found.get(word) or "")), None)):
            off[name] = word
        if not on and not by_default:
            full = next((word for word in _FULL_EFFORT if word in found and not closed(found[word])), None)
            on |= {name: full} if full is not None else {}
    low = {*_mentioned(template, (_LOW,))} and prompt({**on, _LOW: True}) not in (None, prompt(on))
    never = not off and by_default
    return Switches(by_default, on, None if never else off, efforts, bool(low))


def _mentioned(template: str, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if re.search(rf"\b{name}\b", template)]
