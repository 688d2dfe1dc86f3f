"""Choose a chat template's format of tool calls: the one that reads back what the template itself writes."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from octavo.chat.tools.formats.row import Format
from octavo.chat.tools.formats.spelling import spelled, suffixed, worded
from octavo.chat.tools.formats.table import ROWS, TOOL_FORMATS
from octavo.chat.tools.formats.writer import write_calls
from octavo.chat.tools.parsers import CallPiece, reader_of
from octavo.text.chat_template import ChatTemplateError, render
from octavo.text.content_format import with_parts
from octavo.text.messages import for_template

logger = logging.getLogger(__name__)

Call = tuple[str, dict[str, Any]]

# What a template must write so that a format is taken: texts that quote, look like tags or numbers, all kinds of value.
_LOOK_UP: dict[str, Any] = {
    "type": "object",
    "properties": {
        name: {"type": kind, "description": name}
        for name, kind in (
            ("text", "string"),
            ("count", "integer"),
            ("ratio", "number"),
            ("exact", "boolean"),
            ("filter", "object"),
            ("tags", "array"),
        )
    },
    "required": [],
}
_LOOK_UP["properties"]["filter"]["additionalProperties"] = {"type": "string"}  # some templates count on these
_LOOK_UP["properties"]["tags"]["items"] = {"type": "string"}
_SCHEMAS: dict[str, dict[str, Any]] = {"look_up": _LOOK_UP, "now": {"type": "object", "properties": {}, "required": []}}
_TEXT: Call = ("look_up", {"text": 'It\'s "so" <b>é日</b>\n  two\\', "count": 3, "ratio": -0.5, "exact": True})
_NESTED: Call = ("look_up", {"text": "007", "filter": {"size": {"of": ["a", "b"]}, "open": False}, "tags": ["x, y"]})
_BARE: Call = ("now", {})
_WORDS: dict[str, Any] = {"text": None, "exact": True, "ratio": False}
_PLAIN: Call = ("look_up", {"text": "Paris", "count": 3})
_TURNS: tuple[tuple[Call, ...], ...] = ((_TEXT,), (_NESTED,), (_BARE,), (_NESTED, _BARE))
_PLAIN_TURNS: tuple[tuple[Call, ...], ...] = ((_PLAIN,), (_BARE,))  # of templates that escape nothing
_PROBES = ((_TURNS, False), (_TURNS, True), (_PLAIN_TURNS, False), (_PLAIN_TURNS, True))
_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in _SCHEMAS.items()
]
# Limit of all renderings that find a format: a few calls take a hundredth of it.
_PROBE_STEPS, _PROBE_BYTES = 3_000_000, 32 << 20
_MAX_TURN = 100_000  # characters that a turn with a call or two may take
_USER = {"role": "user", "content": "Look it up."}
_OTHER_MARKS = Counter(mark for row in ROWS for mark in row.also)  # one that rows share tells none of them

# Texts by which a template shows a format without writing calls; the most specific first.
_SIGNS = tuple(
    (re.compile(sign), name)
    for sign, name in (
        (r"<\|channel\|>final", "openai"),
        (r"\[TOOL_CALLS\]", "mistral"),
        (r">>>\$\{recipient\}", "functionary_v3_2"),
        (r"<atem:function_calls>", "muse_glimmer"),
        (r"<\|START_ACTION\|>", "cohere_command3"),
        (r"<seed:tool_call>", "seed_oss"),
        (r"<minimax:tool_call>", "minimax_m2"),
        (r"<｜DSML｜function_calls>", "deepseek_v32"),
        (r"<｜DSML｜tool_calls>", "deepseek_v4"),
        (r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "deepseek_v3"),
        (r"<｜tool▁call▁begin｜>", "deepseek_v31"),
        (r"<function=[^>]*>\s*<parameter=", "qwen3_xml"),
        (r"<arg_key>[^<]*</arg_key>\s*<arg_value>", "glm45"),
        (r"<tool_call>\s*\[?\s*\{(?![{%#])", "hermes"),
        (r"<TOOLCALL>\s*\[", "nemotron_nano_v2"),
        (r"<tool_calls>\s*\[", "hunyuan_a13b"),
        (r"<\|tool_(list|call)_start\|>|List of tools: \[", "lfm2"),
        (r"<\|tool_calls_section_begin\|>", "kimi_k2"),
        (r"prefix function calls with functools|functools\[\{", "phi4_mini_json"),
        (r"<\|tool_call\|>", "granite"),
        (r"<\|python_start\|>|func_name1\(params_name1", "pythonic"),
        (r'\{"name": function name, "parameters": ', "llama3_json"),
    )
)


@dataclass(frozen=True)
class CallFormat:
    """The format in which a template's model writes calls."""

    parser: str  # of TOOL_FORMATS
    how: str  # "read back", "described", "flag", "response_template"; or "generic": a prompt of our own tells of tools
    arguments_as_text: bool = False  # the template takes the arguments of earlier calls as JSON text alone
    told: bool = True  # the template describes tools itself; False: it must not see them
    writes: bool = True  # the template writes earlier calls; False: they become text of their message
    needs_none: bool = False  # the template writes calls only of messages whose content is null
    spelled: Format | None = None  # the row with the template's own line breaks
    one_only: bool = False  # the template writes no more than one call of a turn

    @property
    def generic(self) -> bool:
        """True if the format is one of ours, which the template does not know."""
        return self.how == "generic"

    @property
    def shown(self) -> str:
        """The format's name, for lists of models: "generic" where it is one of ours."""
        return "generic" if self.generic else self.parser

    @property
    def row(self) -> Format:
        """The format's row in the table, spelled as the template does, or as we do where it writes no calls."""
        row = self.spelled or TOOL_FORMATS[self.parser]
        return row if self.writes else replace(row, gaps=row.spaces)


def knows_tools(template: str) -> bool:
    """True if a chat template describes tools itself."""
    return "tools" in template


@lru_cache(maxsize=64)
def format_of(template: str, flag: str | Format | None = None) -> CallFormat:
    """The format of a template's calls; ``flag``, one or its name, overrides what the template says. Logs it once."""
    own = own_format(template)
    if flag is not None:
        return _flagged(own, flag, knows_tools(template))
    if own is not None:
        how = own.how if own.told else f"{own.how}; the template describes no tools, so a prompt of our own does"
        logger.info("chat template: calls are %s (%s)", own.parser, how)
        return own
    if knows_tools(template):
        logger.warning(
            "chat template: no format known here reads back the calls that it writes, so the model is told of tools in "
            "a generic prompt, in the format hermes; --tool-call-parser names another format"
        )
    else:
        logger.info("chat template: knows no tools, so the model is told of them in a generic prompt")
    return CallFormat("hermes", "generic", told=False, writes=False)


def _flagged(own: CallFormat | None, flag: str | Format, told: bool) -> CallFormat:
    """The format that a flag names, told and written as the template is able to."""
    if isinstance(flag, Format):
        made = own or CallFormat(flag.name, "generic", told=told, writes=told)
        return replace(made, parser=flag.name, how="response_template" if told else "generic", spelled=flag)
    if own is None:
        return CallFormat(flag, "flag" if told else "generic", told=told, writes=told)
    if TOOL_FORMATS[own.parser] is not TOOL_FORMATS[flag]:
        logger.warning(
            "chat template: calls are %s, as --tool-call-parser says, but by the template they would be %s (%s)",
            flag,
            own.parser,
            own.how,
        )
    same = TOOL_FORMATS[own.parser] is TOOL_FORMATS[flag]
    return replace(own, parser=flag, how="flag", spelled=own.spelled if same else None)


@lru_cache(maxsize=64)
def own_format(template: str) -> CallFormat | None:
    """The format of the calls that a template writes or describes; None if no format here is its, or if it takes too
    much for a few calls."""
    from octavo.text.template_meter import Meter, metered

    with metered(Meter(steps=_PROBE_STEPS, size=_PROBE_BYTES)) as meter:
        found = _own_format(template)
    if meter.why is None:
        return found
    logger.warning("chat template: it %s for a few calls of tools, so their format is not looked for", meter.why)
    return None


def _own_format(template: str) -> CallFormat | None:
    writes_calls = False
    told = knows_tools(template)
    with suppress(ChatTemplateError):
        told = _TOOLS[0]["function"]["name"] in _rendered(template, [_USER])
    for content, (probes, as_text) in product(("", None), _PROBES):
        turns = list(_written_turns(template, probes, as_text, content))
        writes_calls = writes_calls or bool(turns)
        for row in (suffixed(row, turns[0][1][0]) for row in ROWS) if turns else ():
            if all(any(_calls_in(row, text) == expected for text in texts) for expected, texts in turns):
                own = spelled(row, ((calls, texts[0]) for calls, texts in turns))
                one_only = all(len(calls) == 1 for calls, _ in turns)
                own = _worded(_numbered(own, template, as_text, content), template, as_text, content)
                return CallFormat(
                    row.name, "read back", as_text, told, needs_none=content is None, spelled=own, one_only=one_only
                )
        if turns and content == "" and (probes, as_text) == _PROBES[-1]:
            break
    if writes_calls or not knows_tools(template):
        return None
    source = template.replace("\\n", "\n").replace('\\"', '"')
    found = next((name for sign, name in _SIGNS if sign.search(source)), None)
    return CallFormat(found, "described", writes=False) if found else None


def _numbered(row: Format, template: str, as_text: bool, content: str | None) -> Format:
    """The row with what a second turn tells of the numbers of its calls."""
    if row.gaps is None or "{index}" not in row.header + row.layout:
        return row
    turn = {**_turn((_BARE,), as_text), "content": content}
    result = {"role": "tool", "tool_call_id": "callnum00", "content": "12"}
    with suppress(ChatTemplateError):
        before = _rendered(template, [_USER, turn, result])
        tail = _rendered(template, [_USER, turn, result, turn]).removeprefix(before)
        goes_on = write_calls(row, [_BARE], 1) in tail
        return replace(row, gaps=replace(row.gaps, counts_on=goes_on))
    return row


def _worded(row: Format, template: str, as_text: bool, content: str | None) -> Format:
    """The row with the template's words for true, false and null."""
    with suppress(ChatTemplateError):
        turn = {**_turn((("look_up", _WORDS),), as_text), "content": content}
        return worded(row, _WORDS, _rendered(template, [_USER, turn]))
    return row


def _written_turns(
    template: str, probes: tuple[tuple[Call, ...], ...], as_text: bool, content: str | None
) -> Iterator[tuple[list[Call], list[str]]]:
    """Calls, and the ways to cut what the template writes of them; none where it writes no call."""
    with suppress(ChatTemplateError):
        before = _rendered(template, [_USER])
        opened = _rendered(template, [_USER], add_generation_prompt=True)
        for calls in probes:
            with suppress(ChatTemplateError):  # some refuse several calls
                whole = _rendered(template, [_USER, {**_turn(calls, as_text), "content": content}])
                shared = _shared(whole, before)
                tail, prompt = whole[shared:], opened[shared:]
                if len(tail) <= _MAX_TURN and all(name in tail for name, _ in calls):
                    tag = whole.rfind("<", 0, shared)  # a tag that the two share only in part
                    cut = whole[tag:] if tag >= 0 and ">" not in whole[tag:shared] else tail
                    yield list(calls), [tail, tail[_shared(tail, prompt) :], cut]


def _shared(first: str, second: str) -> int:
    """Length of the beginning that two texts share."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _rendered(template: str, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
    messages = with_parts(for_template(messages, template), template, "")
    return render(
        template, messages, tools=_TOOLS, add_generation_prompt=add_generation_prompt, bos_token="", eos_token=""
    )


def _turn(calls: tuple[Call, ...], as_text: bool) -> dict[str, Any]:
    made = [
        {"id": f"callnum{i:02}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": "", "tool_calls": made}
    return with_arguments_as_text(message) if as_text else message


def with_arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its calls' arguments as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(given, ensure_ascii=False)}}
        if not isinstance(given := call["function"]["arguments"], str)
        else call
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _calls_in(row: Format, text: str) -> list[Call] | None:
    """Return the calls that a format's reader finds in ``text``; None if their arguments are not JSON."""
    parser = reader_of(replace(row, also=tuple(mark for mark in row.also if _OTHER_MARKS[mark] == 1)), _SCHEMAS)
    found: list[tuple[str, str]] = []
    for piece in [*parser.feed(text), *parser.finish()]:
        if isinstance(piece, CallPiece) and piece.name is not None:
            found.append((piece.name, piece.arguments))
        elif isinstance(piece, CallPiece):
            found[-1] = (found[-1][0], found[-1][1] + piece.arguments)
    try:
        return [(name, json.loads(arguments)) for name, arguments in found]
    except ValueError:
        return None
