"""Grammars of what stands around calls: headers with names and numbers, sections, lists, and gaps. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.chat.structured import ANY_BREAKS, CallGrammar, TokenId, lark_of
from octavo.chat.tools.formats.row import Format

_FIELD = re.compile(r"(\{index\}|\{id\}|\{name\})")
_ID = 9  # characters of an id that stands in a call
MAX_NUMBERED = 8  # calls of one answer whose numbers and ids a grammar holds
_MANY = 256  # rules for calls; with more of them, only the first call's number is held


def lark_of_gap(row: Format, name: str, token_id: TokenId) -> str:
    """Lark for a gap of a row; any line breaks where the template's own are unknown."""
    gap = getattr(row.spaces, name)
    return ANY_BREAKS if row.gaps is None and not gap.strip() else lark_of(gap, token_id)


@dataclass(frozen=True)
class Member:
    """A call of one function: the text before its arguments with the fields {name}, {index} and {id}, its name, Lark
    for the arguments, and the text behind them."""

    before: str
    name: str
    arguments: str
    behind: str
    section: str = ""  # in front of the section that it is in


@dataclass(frozen=True)
class Calls:
    """A call of each function, and what Lark needs to know of these."""

    members: Sequence[Member]
    parts: dict[str, str] = field(default_factory=dict)
    rules: Sequence[str] = ()


@dataclass(frozen=True)
class Numbers:
    """The number of calls before an answer, and the ids of its first calls."""

    first: int = 0
    ids: Sequence[str] = ()


def assembled(
    row: Format, calls: Calls, several: bool, token_id: TokenId, numbers: Numbers | None = None
) -> CallGrammar:
    """The grammar of a turn's calls. ``several``: more than one."""

    def text(literal: str) -> str:
        return lark_of(literal, token_id)

    def gap(name: str) -> str:
        return lark_of_gap(row, name, token_id)

    begin, end = map(text, row.around)
    opened = f"{begin} {gap('opened')}" if begin else ""
    closed = f"{gap('closed')} {end}" if end else ""
    before, behind = (opened, closed) if row.each else ("", "")
    if row.listed:
        between = text(row.spaces.comma)
    elif row.addressed:
        between = text(f"{row.thoughts[1]}{row.texts[0]} ")
    else:
        between = gap("between")

    def call(place: int | None) -> str:
        fields = _fields(row, numbers if place is not None else None, place or 0)
        made = []
        for member in calls.members:
            lead = text(member.section.replace("{name}", member.name))
            written = _member(member, fields, token_id)
            made.append(" ".join(part for part in (lead, before, written, behind) if part))
        return " | ".join(made)

    rules, following = _numbered(row, call, len(calls.members), several, between, numbers)
    listed = ('"["', text(row.spaces.bracket), following, text(row.spaces.last), '"]"')
    inner = " ".join(listed) if row.listed else following
    rule = inner if row.each else f"{opened} {inner} {closed}"
    return CallGrammar(f"({rule})", calls.parts, "\n".join([*calls.rules, *rules]))


def _numbered(
    row: Format,
    call: Callable[[int | None], str],
    functions: int,
    several: bool,
    between: str,
    numbers: Numbers | None,
) -> tuple[list[str], str]:
    """Rules for a call at each place, and Lark for all calls of a turn."""
    written = row.header + row.layout
    if numbers is None or ("{index}" not in written and not numbers.ids):
        return [f"call: {call(None)}"], f"call ({between} call)*" if several else "call"
    if not several:
        return [f"call: {call(0)}"], "call"
    count = min(MAX_NUMBERED, max(1, _MANY // functions))
    rules = [f"call_{place}: {call(place)}" for place in range(count)]
    if count == 1:
        return [*rules, f"call: {call(None)}"], f"call_0 ({between} call)*"
    rest = ""
    for place in reversed(range(1, count)):
        rest = f" ({between} call_{place}{rest})?"
    return rules, f"call_0{rest}"


def _fields(row: Format, numbers: Numbers | None, place: int) -> dict[str, str]:
    """Lark for a call's number and id."""
    ids = numbers.ids if numbers is not None else ()
    anyone = f"/[A-Za-z0-9]{{{row.id_length or _ID}}}/"
    return {
        "{index}": "/[0-9]{1,9}/" if numbers is None else json.dumps(str(numbers.first + place + row.spaces.counted)),
        "{id}": json.dumps(ids[place]) if place < len(ids) else anyone,
    }


def _member(member: Member, fields: dict[str, str], token_id: TokenId) -> str:
    # A name is text, whatever it looks like.
    fields = {**fields, "{name}": json.dumps(member.name, ensure_ascii=False)}

    def lark(text: str) -> list[str]:
        return [fields.get(part) or lark_of(part, token_id) for part in _FIELD.split(text)]

    parts = [*lark(member.before), member.arguments, *lark(member.behind)]
    return " ".join(part for part in parts if part)


def written_header(row: Format) -> str:
    """A row's header as a grammar demands it, with its fields."""
    return re.sub(r"\(([^)]*)\)\?", lambda found: "" if "{" in found[1] else found[1], row.header)
