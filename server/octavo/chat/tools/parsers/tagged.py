"""Calls whose arguments stand between tags, one by one, as bare text: Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from octavo.chat.tools.parsers.core import ToolParser, overlap
from octavo.chat.tools.parsers.reader import CutOffError, NotACallError, Steps
from octavo.chat.tools.parsers.values import json_of, kinds_of, schema_of

_NAME = re.compile(r"[^\s<>\"'={}]*")
_KEY = re.compile(r"[^<>\"\n]*")
_WORD = re.compile(r"[a-z]*")


@dataclass(frozen=True)
class Tags:
    """Tags that a family writes around calls, names and arguments."""

    call: str  # in front of a name
    name_end: str
    key: str
    key_end: str
    value_end: str
    call_end: str
    value: str = ""  # in front of a value
    section: tuple[str, str] = ("", "")  # around all calls; "" where each stands alone
    each: bool = False  # a section holds one call, as the model writes it
    newline: str = ""  # what the model writes between tags
    trims: bool = False  # one newline at both ends of a value belongs to the tags
    typed: bool = False  # behind key_end stands whether the value is a text, then ``">``


class TaggedParser(ToolParser):
    """A text is given out as it comes, where its schema allows nothing else; other values when they are whole. An end
    tag inside a value belongs to it unless another tag follows. A call may end with the text without its end tags."""

    TAGS: ClassVar[Tags]

    def _parse(self) -> Steps[None]:
        while found := (yield from self._content_until(*self.MARKERS)):
            yield from self._attempt(self._calls(found))

    def _calls(self, found: str) -> Steps[None]:
        tags = self.TAGS
        begin, end = tags.section
        if not begin or found != begin:
            yield from self._call(known_only=bool(begin))
            yield from self._optional(end)
            return
        self._at += len(begin)
        self._name = ""
        first = True
        while True:
            yield from self._skip_space()
            if not first and not (yield from self._starts_with(tags.call)):
                yield from self._optional(end)
                return
            yield from self._call()
            self._settled = self._at
            first = False

    def _optional(self, tag: str) -> Steps[None]:
        """Read white space and ``tag``, or nothing."""
        begin = self._at - self._settled
        yield from self._skip_space()
        if not tag or not ((yield from self._read(tag)) or self._ends_in(tag)):
            self._at = self._settled + begin

    def _ends_in(self, tag: str) -> bool:
        """Return True if the text ends inside ``tag``, and skip its rest."""
        if self._ended and tag.startswith(self._text[self._at :]):
            self._at = len(self._text)
            return True
        return False

    def _call(self, known_only: bool = False) -> Steps[None]:
        tags = self.TAGS
        yield from self._expect(tags.call)
        self._name = ""
        yield from self._skip_space()
        name = yield from self._called_name(self._run_of(_NAME))
        yield from self._skip_space()
        if not name or (known_only and self._names and name not in self._names):
            raise NotACallError
        yield from self._expect(tags.name_end)
        yield from self._skip_space()
        following = yield from self._one_of(tags.key, tags.call_end)
        rest = self._text[self._at :]
        if not following and not (self._ended and tags.name_end and tags.call_end.startswith(rest)):
            raise NotACallError
        self._start_call(name)
        self._settled = self._at
        self._in_arguments = True
        yield from self._arguments_in_tags(self._schemas.get(name))
        self._in_arguments = False

    def _one_of(self, *literals: str) -> Steps[str]:
        """The one of ``literals`` that comes next; "" if none does."""
        for literal in literals:
            if (yield from self._starts_with(literal)):
                return literal
        return ""

    def _arguments_in_tags(self, parameters: Any) -> Steps[None]:
        schema: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else {}
        tags, lead = self.TAGS, "{"
        try:
            while True:
                yield from self._skip_space()
                if not (yield from self._read(tags.key)):
                    break
                key = (yield from self._run_of(_KEY)).strip()
                yield from self._expect(tags.key_end)
                kinds = kinds_of(schema_of(schema, key), schema)
                if tags.typed:
                    word = yield from self._run_of(_WORD)
                    yield from self._expect('">')
                    kinds = {"string"} if word == "true" else kinds - {"string"}
                if tags.value:
                    yield from self._skip_space()
                    yield from self._expect(tags.value)
                lead = yield from self._value(f"{lead}{json.dumps(key, ensure_ascii=False)}: ", kinds)
            if not (yield from self._read(tags.call_end)) and not self._ends_in(tags.call_end):
                end = tags.section[1]  # models forget the call's own
                if not end or not (yield from self._starts_with(end)):
                    raise NotACallError
        except CutOffError:
            raise
        except NotACallError:
            self._at = self._settled if self._at < len(self._text) else self._at
            self._give_arguments("{}" if lead == "{" else "}")
            self._in_arguments = False
            raise
        self._give_arguments("{}" if lead == "{" else "}")

    def _value(self, lead: str, kinds: set[str]) -> Steps[str]:
        """Give out ``lead`` and a value, read up to behind its end tag. Returns what stands before the next key."""
        streams = kinds == {"string"}
        if self.TAGS.trims:
            yield from self._read("\n")
        if streams:
            self._give_arguments(lead + '"')
        held = ""
        while True:
            text, ended = yield from self._piece_of_value()
            if streams:
                self._give_arguments(_escaped(text))
            else:
                held += text
                self._settled = self._at
            if ended:
                break
        self._give_arguments('"' if streams else lead + json_of(held, kinds))
        return ", "

    def _piece_of_value(self) -> Steps[tuple[str, bool]]:
        """The next piece, and whether the value ends behind it: its end tag is read, too."""
        end = ("\n" if self.TAGS.trims else "") + self.TAGS.value_end
        plain = self.TAGS.value_end
        while True:
            at = self._text.find(plain, self._at)
            if at >= 0:
                trimmed = len(end) - len(plain) if self._text.startswith(end, max(self._at, at - 1)) else 0
                piece = self._text[self._at : at - trimmed] if at - trimmed >= self._at else ""
                if piece:
                    self._at += len(piece)
                    return piece, False
                tag = self._text[self._at : at + len(plain)]
                begin = self._at - self._settled
                self._at += len(tag)
                if (yield from self._is_end_of_value()):
                    self._at = self._settled + begin + len(tag)
                    return "", True
                self._at = self._settled + begin + len(tag)
                return tag, False
            if self._at < len(self._text):
                hold = max(overlap(self._text, end), overlap(self._text, plain))
                piece = self._text[self._at : max(self._at, len(self._text) - hold)]
                if piece:
                    self._at += len(piece)
                    return piece, False
            if not (yield from self._more()):  # no end tag any more
                piece = self._text[self._at :]
                rest = piece[: len(piece) - max(overlap(piece, end), overlap(piece, plain))]
                self._at = len(self._text)
                return rest, True

    def _is_end_of_value(self) -> Steps[bool]:
        """True if the end tag just read ends the value: a tag of the call, or nothing, follows."""
        tags = self.TAGS
        yield from self._skip_space()
        followers = [tag for tag in (tags.key, tags.call_end, tags.section[1]) if tag]
        if (yield from self._one_of(*followers)):
            return True
        rest = self._text[self._at :]
        return self._ended and any(tag.startswith(rest) for tag in followers)

    def _give_cut_call(self) -> None:
        """Drop the rest of a call that was cut off: it is markup or half a value, and the certain part is already out
        as JSON."""
        if not self._in_arguments:
            super()._give_cut_call()
            return
        self.ends_inside_call = True
        self._at = self._settled = len(self._text)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


_FUNCTION_TAGS = Tags(
    call="<function=",
    name_end=">",
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
    call_end="</function>",
    each=True,
    newline="\n",
)


class Qwen3XmlParser(TaggedParser):
    """``<tool_call><function=f><parameter=k>value</parameter></function></tool_call>``: Qwen3-Coder, Qwen3.5,
    Nemotron 3, Step 3.5."""

    TAGS = replace(_FUNCTION_TAGS, section=("<tool_call>", "</tool_call>"), trims=True)
    MARKERS = ("<tool_call>", "<function=")  # models forget the first


class SeedOssParser(TaggedParser):
    """Parses calls within ``<seed:tool_call>``, with values to the letter: Seed-OSS."""

    TAGS = replace(_FUNCTION_TAGS, section=("<seed:tool_call>", "</seed:tool_call>"))
    MARKERS = ("<seed:tool_call>",)


class GlmParser(TaggedParser):
    """``<tool_call>f<arg_key>k</arg_key><arg_value>value</arg_value></tool_call>``: GLM-4.5 to 5, Ling 3, Laguna."""

    TAGS = Tags(
        call="<tool_call>",
        name_end="",
        key="<arg_key>",
        key_end="</arg_key>",
        value="<arg_value>",
        value_end="</arg_value>",
        call_end="</tool_call>",
    )
    MARKERS = ("<tool_call>",)
    needs_special_tokens = True


class MinimaxM2Parser(TaggedParser):
    """``<minimax:tool_call><invoke name="f"><parameter name="k">value</parameter></invoke></minimax:tool_call>``."""

    TAGS = Tags(
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        call='<invoke name="',
        name_end='">',
        key='<parameter name="',
        key_end='">',
        value_end="</parameter>",
        call_end="</invoke>",
        newline="\n",
    )
    MARKERS = ("<minimax:tool_call>",)
    needs_special_tokens = True


class DeepseekV32Parser(TaggedParser):
    """``<｜DSML｜function_calls>`` and, in it, calls whose parameters say whether they are texts."""

    TAGS = Tags(
        section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        call='<｜DSML｜invoke name="',
        name_end='">',
        key='<｜DSML｜parameter name="',
        key_end='" string="',
        value_end="</｜DSML｜parameter>",
        call_end="</｜DSML｜invoke>",
        newline="\n",
        typed=True,
    )
    MARKERS = ("<｜DSML｜function_calls>",)
    needs_special_tokens = True


class DeepseekV4Parser(DeepseekV32Parser):
    """Parses calls within ``<｜DSML｜tool_calls>``: DeepSeek V4."""

    TAGS = replace(DeepseekV32Parser.TAGS, section=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"))
    MARKERS = ("<｜DSML｜tool_calls>",)
