"""Reader of calls whose arguments are nested tags: MiniMax M3."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from octavo.chat.tools.formats.row import Elements
from octavo.chat.tools.parsers.core import overlap
from octavo.chat.tools.parsers.format_reader import FormatReader
from octavo.chat.tools.parsers.reader import MAX_DEPTH, NotACallError, Steps
from octavo.chat.tools.parsers.values import json_of, kinds_of, schema_of

_TAG = re.compile(r"[^<>]*")
_ITEM = "item"


class ElementsReader(FormatReader):
    """An argument is given out when it is whole, but a text whose schema allows nothing else as it comes."""

    @property
    def _mark(self) -> str:
        assert isinstance(self.row.arguments, Elements)
        return self.row.arguments.mark

    def _call(self, known_only: bool) -> Steps[None]:
        name = yield from self._header(known_only)
        given = self._schemas.get(name)
        schema: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        yield from self._skip_space()
        if not (yield from self._starts_with(self._mark)) and not self._ended:
            raise NotACallError
        self._start_call(name)
        self._in_arguments = True
        self._settled = self._at
        lead = "{"
        while True:
            yield from self._skip_space()
            if (yield from self._starts_with(self.row.call_end)):
                break
            if self._ended and self.row.call_end.startswith(self._text[self._at :]):
                self._at = len(self._text)
                break
            yield from self._expect(self._mark + "<")
            tag = yield from self._tag()
            value = schema_of(schema, tag)
            self._give_arguments(f"{lead}{json.dumps(tag, ensure_ascii=False)}: ")
            yield from self._element(tag, value, schema)
            lead = ", "
        self._give_arguments("{}" if lead == "{" else "}")
        self._in_arguments = False
        yield from self._read(self.row.call_end)

    def _tag(self) -> Steps[str]:
        tag = yield from self._run_of(_TAG)
        if not tag or tag.startswith("/"):
            raise NotACallError
        yield from self._expect(">")
        return tag

    def _element(self, tag: str, schema: Any, parameters: Mapping[str, Any]) -> Steps[None]:
        """Give out the value of an argument, up to its end tag."""
        if kinds_of(schema, parameters) != {"string"}:
            self._give_arguments(_written((yield from self._tree(tag, 1)), schema, parameters))
            return
        self._give_arguments('"')
        end = f"{self._mark}</{tag}>"
        while True:
            at = self._text.find(end, self._at)
            until = at if at >= 0 else max(self._at, len(self._text) - overlap(self._text, end))
            piece, self._at = self._text[self._at : until], until
            self._give_arguments(json.dumps(piece, ensure_ascii=False)[1:-1])
            if at >= 0:
                self._at += len(end)
                break
            if not (yield from self._more()):
                raise NotACallError
        self._give_arguments('"')

    def _tree(self, tag: str, depth: int) -> Steps[Any]:
        """The text of an element, or its elements as pairs, up to its end tag, which is read."""
        if depth > MAX_DEPTH:
            raise NotACallError
        text, children = "", list[tuple[str, Any]]()
        while True:
            at = self._text.find(self._mark, self._at)
            until = at if at >= 0 else max(self._at, len(self._text) - overlap(self._text, self._mark))
            text, self._at = text + self._text[self._at : until], until
            if at < 0:
                if not (yield from self._more()):
                    raise NotACallError
                continue
            self._at += len(self._mark)
            yield from self._expect("<")
            if (yield from self._read("/")):
                yield from self._expect(tag + ">")
                return children or text
            child = yield from self._tag()
            children.append((child, (yield from self._tree(child, depth + 1))))

    def _give_cut_call(self) -> None:
        """Drop the rest of a call that was cut off: what is certain is already out as JSON."""
        if not self._in_arguments:
            super()._give_cut_call()
            return
        self.ends_inside_call = True
        self._at = self._settled = len(self._text)


def _written(tree: Any, schema: Any, parameters: Mapping[str, Any]) -> str:
    """A tree as JSON, its texts of the kinds of the schema."""
    schema = schema if isinstance(schema, Mapping) else {}
    kinds = kinds_of(schema, parameters)
    if isinstance(tree, str):
        if not tree.strip() and kinds and "string" not in kinds:
            return {"object": "{}", "array": "[]"}.get(next(iter(kinds)) if len(kinds) == 1 else "", "null")
        return json_of(tree, kinds)
    if all(tag == _ITEM for tag, _ in tree) and ("array" in kinds or not schema_of(schema, _ITEM)):
        return "[" + ", ".join(_written(value, schema.get("items"), parameters) for _, value in tree) + "]"
    members: dict[str, list[str]] = {}
    for tag, value in tree:
        inner = schema_of(schema, tag)
        members.setdefault(tag, []).append(_written(value, inner, parameters))
    texts = []
    for tag, values in members.items():
        several = len(values) > 1 and not kinds_of(schema_of(schema, tag), parameters)
        value = f"[{', '.join(values)}]" if several else values[-1]
        texts.append(f"{json.dumps(tag, ensure_ascii=False)}: {value}")
    return "{" + ", ".join(texts) + "}"
