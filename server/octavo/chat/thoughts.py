"""Find out by rendering how a chat template's model thinks: its tags around thoughts, and what switches them."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from octavo.chat.options import AUTO, NONE
from octavo.chat.switches import Switches, find_switches
from octavo.chat.thought_tags import ALWAYS_THINKING, HARMONY, HUNYUAN, TAGS_BY_NAME, THOUGHT_TAGS, ThoughtTags
from octavo.text.chat_template import ChatTemplateError, render
from octavo.text.content_format import with_parts
from octavo.text.messages import REASONING, for_template

logger = logging.getLogger(__name__)

# Limits of all renderings of a template that look for thoughts: a message or two take a thousandth of them.
_PROBE_STEPS, _PROBE_BYTES = 3_000_000, 32 << 20
_MAX_PROMPT = 200_000  # characters that a template may make of two messages
_USER = {"role": "user", "content": "Is it so?"}
_THOUGHT, _ANSWER = "I wonder about it.", "It is so."
_SPOKEN = {"role": "assistant", "content": _ANSWER, **dict.fromkeys((*REASONING, "thinking"), _THOUGHT)}
_TAG = r"<[^<>\s]{1,60}>|\[/?[A-Z_]{1,40}\]"
_SUFFIXED_END = re.compile(r"</think:[^<>\s]+>\s*\Z")  # of Hunyuan
_OPENING, _CLOSING = re.compile(rf"(?:{_TAG})\s*\Z"), re.compile(rf"\s*(?:{_TAG})")


@dataclass(frozen=True)
class Thoughts:
    """The way in which the model of a template thinks, and how that was found."""

    tags: ThoughtTags | None  # None: thoughts are not told from answers
    how: str  # "read back", "opened by the prompt", "described", "flag", "response_template", or "none"
    switches: Switches = field(default_factory=Switches)
    always: bool = False  # where neither prompt nor text says so, the output begins inside the thoughts

    def inside(self, prompt_end: str) -> bool:
        """True if the output for a prompt with this end begins inside the thoughts."""
        if self.tags is None:
            return False
        return self.tags.opened_by(prompt_end) or (self.always and not self.tags.closed_by(prompt_end))


@lru_cache(maxsize=64)
def thoughts_of(template: str, flag: str | ThoughtTags | None = None) -> Thoughts:
    """Return how the model of a template thinks, and log it once. ``flag``, tags or a name of `REASONING_PARSERS`,
    overrides what the template says."""
    found = _found(template)
    if flag in (None, AUTO):
        if found.tags is not None:
            logger.info("chat template: thoughts are %s (%s)%s", _shown(found.tags), found.how, _switch_of(found))
        return found
    if isinstance(flag, ThoughtTags):
        return Thoughts(flag, "response_template", found.switches)
    tags = None if flag in (NONE, HARMONY) else TAGS_BY_NAME[str(flag)]
    if found.tags is not None and flag in found.tags.names:
        tags = found.tags  # with the template's own suffix
    if found.tags is not None and tags is not None and tags.around != found.tags.around:
        logger.warning(
            "chat template: thoughts are %s, as --reasoning-parser says, but by the template they would be %s (%s)",
            _shown(tags),
            _shown(found.tags),
            found.how,
        )
    return Thoughts(tags, "none" if tags is None else "flag", found.switches, flag in ALWAYS_THINKING)


def _shown(tags: ThoughtTags) -> str:
    return f"{tags.opening} ... {tags.closing}"


def _switch_of(found: Thoughts) -> str:
    def words(variables: Mapping[str, Any]) -> str:
        return " ".join(f"{name}={str(value).lower()}" for name, value in variables.items())

    if found.switches.by_default:
        return f", off by {words(found.switches.off)}" if found.switches.off else ", no switch turns them off"
    return f", on by {words(found.switches.on)}" if found.switches.on else ", off"


def _found(template: str) -> Thoughts:
    """Return what a template shows of its model's thoughts; nothing where it takes too much for a few messages."""
    from octavo.text.template_meter import Meter, metered

    with metered(Meter(steps=_PROBE_STEPS, size=_PROBE_BYTES)) as meter:
        found = _look(template)
    if meter.why is None:
        return found
    logger.warning("chat template: it %s for a few messages, so thoughts are not looked for", meter.why)
    return Thoughts(None, "none")


def _look(template: str) -> Thoughts:
    prompts: dict[tuple[tuple[str, Any], ...], str | None] = {}

    def prompt(variables: Mapping[str, Any]) -> str | None:
        key = tuple(sorted(variables.items()))
        if key not in prompts:
            prompts[key] = _rendered(template, [_USER], variables, True)
        return prompts[key]

    def closed(text: str) -> bool:
        own = any(tags.closed_by(text) for tags in THOUGHT_TAGS if not tags.both_signs)
        return own or _SUFFIXED_END.search(text) is not None

    switches = find_switches(template, prompt, closed)
    opened = prompt(switches.on) or ""
    shown = _rendered(template, [_USER, _SPOKEN], switches.on, False) or ""
    if tags := _read_back(shown, prompt({}) or ""):
        return Thoughts(_with_texts(tags, template), "read back", switches)
    if tags := next((tags for tags in THOUGHT_TAGS if tags.opened_by(opened)), None):
        return Thoughts(_with_texts(tags, template), "opened by the prompt", switches)
    if (last := _OPENING.search(opened)) and (tags := _suffixed(last.group().strip())):
        return Thoughts(tags, "opened by the prompt", switches)
    source = template.replace("\\n", "\n")
    for tags in THOUGHT_TAGS:
        signs = tags.around if tags.both_signs else (tags.closing,)
        if all(sign in source for sign in signs):
            return Thoughts(_with_texts(tags, template), "described", switches)
    return Thoughts(None, "none", switches)


def _read_back(shown: str, prompt: str) -> ThoughtTags | None:
    """The tags that stand around a thought which the template writes: a family's, or what looks like tags."""
    before, found, behind = shown.partition(_THOUGHT)
    between = behind.partition(_ANSWER)[0]
    if not found or len(shown) > _MAX_PROMPT or _ANSWER not in behind:
        return None
    for tags in THOUGHT_TAGS:
        if before.rstrip().endswith(tags.openings) and between.lstrip().startswith(tags.closings):
            return tags
    opening, closing = _OPENING.search(before), _CLOSING.match(between)
    if opening is None or closing is None or opening.group().strip() in prompt:  # that of a message
        return None
    tags = ThoughtTags(opening.group().strip(), closing.group().strip())
    own = _suffixed(tags.opening)
    return own if own is not None and own.around == tags.around else tags


def _suffixed(opening: str) -> ThoughtTags | None:
    """Hunyuan's tags with another suffix; None if ``opening`` is none of them."""
    found = re.fullmatch(r"<think(:[^<>\s]+)>", opening)
    return None if found is None else replace(HUNYUAN, opening=opening, closing=f"</think{found[1]}>")


def _with_texts(tags: ThoughtTags, template: str) -> ThoughtTags:
    """Return, of the families with the same tags, the one whose marks around answers the template has, too."""
    others = (other for other in THOUGHT_TAGS if other.around == tags.around and other.texts)
    return next((other for other in others if all(text.strip() in template for text in other.texts)), tags)


def _rendered(
    template: str, messages: list[dict[str, Any]], variables: Mapping[str, Any], opens_answer: bool
) -> str | None:
    """None where the template refuses the messages or the variables."""
    with suppress(ChatTemplateError):
        return render(
            template,
            with_parts(for_template(messages, template), template, ""),
            add_generation_prompt=opens_answer,
            bos_token="",
            eos_token="",
            **variables,
        )
    return None
