"""Reader of calls whose arguments stand between tags, one by one, as bare text: Qwen3-Coder, GLM, MiniMax, DeepSeek
V3.2."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.chat.tools.formats.row import Params
from octavo.chat.tools.parsers.core import Piece, overlap
from octavo.chat.tools.parsers.format_reader import FormatReader
from octavo.chat.tools.parsers.reader import CutOffError, NotACallError, Steps
from octavo.chat.tools.parsers.values import json_of, kinds_of, schema_of

_KEY = re.compile(r"[^<>\"\n]*")
_WORD = re.compile(r"[a-z]*")
_CDATA, _CDATA_END = "<![CDATA[", "]]>"


class ParamsReader(FormatReader):
    """A text is given out as it comes, where its schema allows nothing else; other values when they are whole. An end
    tag inside a value belongs to it unless another tag follows. A value whose end tag is missing ends where another
    argument of the schema begins, a call with the text."""

    _left: Sequence[str] = ()  # arguments of the schema that are still to come
    _dropped = 0  # characters in front of the text that is still of interest
    # Of the call that is read, as counts of characters from the answer's beginning:
    _again: Mapping[str, int] = {}  # by the tag of an argument, the end of a value behind which it begins again
    _open_until = 0  # no end of the call begins between the places that were looked at and here

    def feed(self, text: str) -> list[Piece]:
        """New text; returns the pieces that are certain by now."""
        self._dropped += self._settled
        return super().feed(text)

    @property
    def _tags(self) -> Params:
        assert isinstance(self.row.arguments, Params)
        return self.row.arguments

    def _call(self, known_only: bool = False) -> Steps[None]:
        row, tags = self.row, self._tags
        name = yield from self._header(known_only)
        yield from self._skip_space()
        following = yield from self._one_of(tags.key, row.call_end)
        rest = self._text[self._at :]
        if not following and not (self._ended and row.header != "{name}" and row.call_end.startswith(rest)):
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
        tags, call_end, lead = self._tags, self.row.call_end, "{"
        properties = schema.get("properties")
        self._left = list(properties) if isinstance(properties, Mapping) else []
        self._again, self._open_until = {}, 0
        try:
            while True:
                yield from self._skip_space()
                if not (yield from self._read(tags.key)):
                    break
                key = self.row.name_of((yield from self._run_of(_KEY)).strip())
                kinds = yield from self._kinds(kinds_of(schema_of(schema, key), schema))
                self._left = [name for name in self._left if name != key]
                if tags.value:
                    yield from self._skip_space()
                    yield from self._expect(tags.value.lstrip())
                lead = yield from self._value(f"{lead}{json.dumps(key, ensure_ascii=False)}: ", kinds)
            if not (yield from self._read(call_end)) and not self._ends_in(call_end):
                end = self.row.section[1]  # models forget the call's own
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

    def _kinds(self, kinds: set[str]) -> Steps[set[str]]:
        """Read what follows a key, up to its value; the kinds of that, where ``kinds`` are the schema's, which decides
        where the model says another one."""
        tags = self._tags
        if not tags.kind_end:
            yield from self._expect(tags.key_end)
            return kinds
        untold = tags.kind_end if tags.key_end[0] == '"' else tags.key_end.partition(">")[0] + ">"
        if not (yield from self._read(tags.key_end)):
            yield from self._expect(untold)
            return kinds
        word = yield from self._run_of(_WORD)
        yield from self._expect(tags.kind_end)
        if word == tags.text_kind:
            return kinds if kinds and "string" not in kinds else {"string"}
        return kinds if kinds == {"string"} else kinds - {"string"}

    def _value(self, lead: str, kinds: set[str]) -> Steps[str]:
        """Give out ``lead`` and a value, read up to behind its end tag. Returns what stands before the next key."""
        end = self._tags.value_end
        if self._tags.cdata and (yield from self._read(_CDATA)):
            end = _CDATA_END + end
            kinds = kinds if kinds and "string" not in kinds else {"string"}
        streams = kinds == {"string"}
        if self._tags.trims:
            if (yield from self._begins_argument()):  # an empty value without its end tag
                self._give_arguments(lead + json_of("", kinds))
                return ", "
            yield from self._read("\n")
        if streams:
            self._give_arguments(lead + '"')
        held = ""
        while True:
            text, ended = yield from self._piece_of_value(end)
            if streams:
                self._give_arguments(_escaped(text))
            else:
                held += text
                self._settled = self._at
            if ended:
                break
        self._give_arguments('"' if streams else lead + json_of(held, kinds))
        return ", "

    def _piece_of_value(self, plain: str) -> Steps[tuple[str, bool]]:
        """The next piece, and whether the value ends behind it: its end tag ``plain`` is read, too."""
        end = ("\n" if self._tags.trims else "") + plain
        while True:
            at = self._text.find(plain, self._at)
            if (following := self._next_key(at)) is not None:
                piece = self._text[self._at : following]
                self._at += len(piece)
                if piece:
                    return piece, False
                if (yield from self._begins_argument()):
                    return "", True
                self._at += 1
                return self._text[self._at - 1], False
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
                hold = max(overlap(self._text, tag) for tag in (end, plain, *self._openings()))
                piece = self._text[self._at : max(self._at, len(self._text) - hold)]
                if piece:
                    self._at += len(piece)
                    return piece, False
            if not (yield from self._more()):  # no end tag any more
                piece = self._text[self._at :]
                rest = piece[: len(piece) - max(overlap(piece, end), overlap(piece, plain))]
                self._at = len(self._text)
                return rest, True

    def _openings(self) -> tuple[str, ...]:
        """The beginnings of an argument, where one that is still to come would end a value whose end tag is missing."""
        return (self._tags.newline + self._tags.key,) if self._left else ()

    def _next_key(self, end: int) -> int | None:
        """The place before ``end``, or -1, at which another argument may begin: on a line of its own, where the family
        writes lines. A text may quote the tag elsewhere."""
        opening = self._tags.newline + self._tags.key
        at = self._text.find(opening, self._at, None if end < 0 else end) if self._left else -1
        return at if at >= 0 else None

    def _begins_argument(self) -> Steps[bool]:
        """True if an argument begins here that the call still lacks; reads the line break before it."""
        tags, begin = self._tags, self._at - self._settled
        yield from self._read(tags.newline)
        key_end = tags.key_end[0] if tags.kind_end else tags.key_end
        tag = yield from self._one_of(*(tags.key + self.row.attribute(name) + key_end for name in self._left))
        if tag and (yield from self._has_value(tag)) and not (yield from self._comes_again(tag)):
            return True
        self._at = self._settled + begin
        return False

    def _has_value(self, tag: str) -> Steps[bool]:
        """True if a value follows ``tag``, which comes next: in rows where one has a tag of its own, that."""
        if not self._tags.value or self._tags.kind_end:
            return True
        begin = self._at - self._settled
        self._at += len(tag)
        yield from self._skip_space()
        found = yield from self._starts_with(self._tags.value.lstrip())
        self._at = self._settled + begin
        return found

    def _comes_again(self, tag: str) -> Steps[bool]:
        """True if the argument that begins here begins again in this call, behind the end of a value: then a value only
        quotes it here."""
        if self._again.get(tag, -1) >= self._dropped + self._at:
            return True
        value_end = self._tags.value_end
        longest = max(len(self.row.call_end), len(value_end))
        at = self._at - self._settled  # up to here nothing is found
        while True:
            text, begin = self._text, self._settled + at
            end = self._end_of_call(begin)
            while (close := text.find(value_end, begin, len(text) if end < 0 else end)) >= 0:
                behind = close + len(value_end)
                while behind < len(text) and text[behind].isspace():
                    behind += 1
                if text.startswith(tag, behind):
                    self._again = {**self._again, tag: self._dropped + close}
                    return True
                if tag.startswith(text[behind : behind + len(tag)]):  # it may, with more text
                    break
                begin = close + len(value_end)
            if close < 0 and end >= 0:
                return False
            at = max(begin, close if close >= 0 else len(text) - longest + 1) - self._settled
            if not (yield from self._more()):
                return False

    def _end_of_call(self, begin: int) -> int:
        """The place from ``begin`` on at which the call's end tag begins; -1 if there is none yet."""
        call_end = self.row.call_end
        begin = max(begin, self._open_until - self._dropped)
        end = self._text.find(call_end, begin)
        self._open_until = self._dropped + (end if end >= 0 else max(begin, len(self._text) - len(call_end) + 1))
        return end

    def _is_end_of_value(self) -> Steps[bool]:
        """True if the end tag just read ends the value: a tag of the call, or nothing, follows."""
        yield from self._skip_space()
        followers = [tag for tag in (self._tags.key, self.row.call_end, self.row.section[1]) if tag]
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
