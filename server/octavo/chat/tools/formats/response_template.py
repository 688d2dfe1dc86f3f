"""Rows out of a model's own ``response_template`` (tokenizer_config.json), which tells how its answers are read. Pure.

Its regular expressions come from a model's repository and are never run: those that only join literals, names and white
space are read as such, and others are refused. So an answer costs what any row's costs, and streams as any row's does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.chat.options import HF, ResponseFormat
from octavo.chat.thought_tags import ThoughtTags
from octavo.chat.tools.formats.row import Arguments, Format, Json, Named, Params, Python, Typed

_FIELDS = {"tool_calls", "thinking", "reasoning_content", "reasoning", "content"}
_MAX_PATTERN = 1000  # characters
_TOKEN = re.compile(
    r"\(\?P?<(?P<name>[a-z_]+)>(?:[^()\\]|\\.){1,80}\)"
    r"|(?P<space>(?:\\s|\\n|\n|\[(?:\\s|\\n|\\t| )+\])[*+?]?\??)"
    r"|\\(?P<escaped>[^A-Za-z0-9])"
    r"|(?P<plain>[^\\^$.|?*+()\[\]\n])",
    re.DOTALL,
)
_GROUP = re.compile(r"\{[a-z_]+\}")
_AT_END = re.compile(r"\|(\$|\\Z)\Z")  # an answer's end ends everything in it anyway


def response_format(template: Any) -> ResponseFormat:
    """The formats that a ``response_template`` of version 1 tells. Raises ValueError for what no row can say."""
    if not isinstance(template, Mapping) or not isinstance(fields := template.get("fields"), Mapping):
        raise ValueError('it must be an object with "fields"')
    if template.get("version", 1) != 1:
        raise ValueError(f"version {template['version']!r} is not known, only 1")
    for name, field in fields.items():
        if name not in _FIELDS or not isinstance(field, Mapping):
            raise ValueError(f"the field {name!r} is none of {', '.join(sorted(_FIELDS))}")
    thought = next((fields[name] for name in ("thinking", "reasoning_content", "reasoning") if name in fields), None)
    tags = None if thought is None else _tags(thought, _marks(fields.get("content", {})))
    row = _row(fields["tool_calls"], tags) if "tool_calls" in fields else None
    return ResponseFormat(row, tags)


def parts_of(pattern: Any) -> tuple[str, ...]:
    """The literals of a regular expression, its named groups as "{name}", and " " for white space between them. Raises
    ValueError for one that says more than these."""
    found = [""]
    if not isinstance(pattern, str) or len(pattern) > _MAX_PATTERN:
        raise ValueError(f"a pattern must be a text of at most {_MAX_PATTERN} characters")
    at = 0
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        behind = pattern[token.end() : token.end() + 1] if token is not None else ""
        if token is None or (behind and behind in "*+?{" and token["space"] is None):
            raise ValueError(f"the pattern {pattern!r} is more than literals, names and white space; none such is run")
        at = token.end()
        if token["name"] is not None:
            found += [f"{{{token['name']}}}", ""]
        elif token["space"] is not None:
            found += [" ", ""]
        else:
            found[-1] += token["escaped"] or token["plain"]
    return tuple(part for part in found if part)


def _anchor(field: Mapping[str, Any], side: str) -> tuple[tuple[str, ...], ...]:
    """The ways to write one side of a field, each as `parts_of` tells; none where the field has no such side."""
    if f"{side}_pattern" in field:
        pattern = field[f"{side}_pattern"]
        return (parts_of(_AT_END.sub("", pattern) if isinstance(pattern, str) else pattern),)
    given = field.get(side, [])
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError(f'"{side}" must be a text or a list of texts')
    return tuple((text,) for text in texts)


def _literals(field: Mapping[str, Any], side: str) -> list[str]:
    """The texts that one side of a field may be, which names nothing."""
    ways = _anchor(field, side)
    if f"{side}_pattern" in field and any(_GROUP.fullmatch(part) for parts in ways for part in parts):
        raise ValueError(f'"{side}" must have no names here')
    return [text for parts in ways if (text := _joined(parts, side))]


def _joined(parts: Sequence[str], side: str) -> str:
    """The one literal of these parts, without the white space around it; "" if there is none. Raises ValueError if
    there are more: a row has no text in which white space may be or not."""
    literals = [part for part in parts if part != " "]
    if len(literals) > 1:
        raise ValueError(f'"{side}" must have no white space of a pattern inside a text')
    return literals[0].strip() if literals else ""


def _tags(field: Mapping[str, Any], texts: tuple[str, ...]) -> ThoughtTags:
    openings, closings = _literals(field, "open"), _literals(field, "close")
    if not openings or not closings:
        raise ValueError('thoughts need "open" and "close"')
    others = [(opening, closings[0]) for opening in openings[1:]] + [(openings[0], end) for end in closings[1:]]
    return ThoughtTags(openings[0], closings[0], (HF,), also=tuple(others), texts=texts)


def _marks(field: Mapping[str, Any]) -> tuple[str, ...]:
    """The marks around texts; none where a text is what stands between all else."""
    openings = _literals(field, "open")
    return (*openings, *_literals(field, "close")) if openings else ()


def _row(field: Mapping[str, Any], tags: ThoughtTags | None) -> Format:
    ways = _anchor(field, "open")
    if not ways:
        raise ValueError('"tool_calls" needs "open" or "open_pattern"')
    ends = _literals(field, "close")
    if len(ends) > 1:
        raise ValueError('calls must have one "close"')
    lead, header = _header(ways[0])
    kind = _arguments(field, named=bool(header))
    texts = tags.texts if tags is not None else ()
    if not header:
        listed = isinstance(kind, Python) or (isinstance(kind, Json) and kind.listed)
        openings = _literals(field, "open")
        if not openings:
            raise ValueError("calls need a text with which they begin")
        section, also = (openings[0], ends[0] if ends else ""), tuple(openings[1:])
        return Format(
            HF, kind, section=section, each=not listed, also=also, texts=texts, known_only=isinstance(kind, Python)
        )
    section_begin, call = _parted(lead)
    if not call:
        raise ValueError("a call needs a text in front of its name")
    end = ends[0] if ends else ""
    if not section_begin:
        return Format(HF, kind, call=call, header=header, call_end=end, texts=texts)
    tag = re.search(r"<([\w:.-]+)[^<>]*\Z", call)  # of a tag whose end the template does not tell
    call_end = f"</{tag[1]}>" if tag is not None else ""
    return Format(
        HF, kind, section=(section_begin, end), each=True, call=call, header=header, call_end=call_end, texts=texts
    )


def _header(parts: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Return what precedes a call's name, and the name with what follows it; "" where nothing is named."""
    named = [at for at, part in enumerate(parts) if len(parts) > 1 and _GROUP.fullmatch(part)]
    if not named:
        return parts, ""
    if len(named) > 1 or parts[named[0]] != "{name}":
        raise ValueError("a call's beginning names its {name} alone")
    return parts[: named[0]], "{name}" + _joined(parts[named[0] + 1 :], "open")


def _parted(lead: tuple[str, ...]) -> tuple[str, str]:
    """A section's begin, perhaps "", and the begin of a call."""
    texts = [part for part in lead if part != " "]
    if len(texts) > 1:
        return _joined(texts[:-1], "open"), texts[-1]
    text = texts[0] if texts else ""
    at = text.rfind("<")
    return (text[:at], text[at:]) if at > 0 and text[:at].endswith(">") else ("", text)


def _arguments(field: Mapping[str, Any], named: bool) -> Arguments:
    content, given = field.get("content", "text"), field.get("content_args", {})
    given = given if isinstance(given, Mapping) else {}
    if content == "json" and named:
        quotes = given.get("string_delims")
        if not quotes:
            return Named()
        pair = quotes[0] if isinstance(quotes, list) and len(quotes) == 1 else None
        quote = pair[0] if isinstance(pair, list) and len(pair) == 2 and pair[0] == pair[1] else None
        if given.get("unquoted_keys") and isinstance(quote, str) and quote:
            return Typed(quote)
        raise ValueError('"string_delims" must be one text on both sides, of keys without quotes')
    if content == "json" and not given:
        name, arguments = _keys(field.get("transform"))
        return Json(name, arguments, listed=field.get("transform_each") is True)
    if content == "python-call-list" and not named:
        return Python()
    if content == "xml-inline" and named:
        return _params(parts_of(given.get("tag_pattern")))
    raise ValueError(f'calls whose "content" is {content!r} are not read here')


def _keys(transform: Any) -> tuple[str, str]:
    """The keys of the name and the arguments in an object that is a call."""
    function = transform.get("function") if isinstance(transform, Mapping) else None
    if function is None or function == "{content}":
        return "name", "arguments"
    found = []
    for key in ("name", "arguments"):
        path = function.get(key) if isinstance(function, Mapping) else None
        told = re.fullmatch(r"\{(?:content\.)?(\w{1,80})\}", path) if isinstance(path, str) else None
        if told is None:
            raise ValueError(f'"transform" must take the {key} from a key of the content')
        found.append(told[1])
    return found[0], found[1]


def _params(parts: tuple[str, ...]) -> Params:
    """Arguments between tags, out of the pattern of one."""
    bare = [part for part in parts if part != " "]
    own = [bare.pop(3)] if len(bare) == 6 and "{value}" not in bare[:4] else []  # the value's tag, behind white space
    if len(bare) != 5 or (bare[1], bare[3]) != ("{key}", "{value}"):
        raise ValueError('"tag_pattern" must be literals around a key and a value')
    value = parts.index("{value}")
    key, key_end, value_end = bare[0], bare[2], bare[4]
    trims = parts[value - 1] == " " or parts[value + 1] == " "
    if own:
        return Params(key, key_end, value_end, value=own[0], newline="\n", trims=trims)
    between = re.fullmatch(r"(.+?>)\s*(<[^<>/]+>)", key_end, re.DOTALL)  # a tag of the value's own
    if between is not None:
        return Params(key, between[1], value_end, value=between[2], newline="\n")
    return Params(key, key_end, value_end, newline="\n", trims=trims)
