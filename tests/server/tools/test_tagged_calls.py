"""Calls with their arguments between tags: however the text is cut, values are exact, of the kinds of the schema, and
come as they are written."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import cpu_time

from octavo.chat.tools.formats.table import TOOL_FORMATS
from octavo.chat.tools.parsers import CallPiece, reader_of

SCHEMAS: dict[str, dict[str, Any]] = {
    "write": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "path": {"$ref": "#/$defs/path"},
            "count": {"type": "integer"},
            "ratio": {"type": ["number", "null"]},
            "exact": {"type": "boolean"},
            "filter": {"type": "object"},
            "tags": {"type": "array"},
            "mixed": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "unit": {"enum": ["celsius", "kelvin"]},
        },
        "$defs": {"path": {"type": "string"}},
    },
    "now": {"type": "object", "properties": {}},
}
KINDS = ["qwen3_xml", "seed_oss", "glm45", "minimax_m2", "deepseek_v32", "deepseek_v4"]
Call = tuple[str, dict[str, Any]]


def bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def written(kind: str, made: list[Call], newline: str = "\n") -> str:
    """The calls as the families' templates write them."""
    if kind in ("qwen3_xml", "seed_oss"):
        tag, around = ("tool_call", "\n") if kind == "qwen3_xml" else ("seed:tool_call", "")
        return newline.join(
            f"<{tag}>{newline}<function={name}>{newline}"
            + "".join(f"<parameter={k}>{around}{bare(v)}{around}</parameter>{newline}" for k, v in arguments.items())
            + f"</function>{newline}</{tag}>"
            for name, arguments in made
        )
    if kind == "glm45":
        return newline.join(
            f"<tool_call>{name}{newline}"
            + "".join(
                f"<arg_key>{k}</arg_key>{newline}<arg_value>{bare(v)}</arg_value>{newline}"
                for k, v in arguments.items()
            )
            + "</tool_call>"
            for name, arguments in made
        )
    mark = "" if kind == "minimax_m2" else "｜DSML｜"
    section = {"minimax_m2": "minimax:tool_call", "deepseek_v32": "｜DSML｜function_calls"}.get(
        kind, "｜DSML｜tool_calls"
    )
    calls = newline.join(
        f'<{mark}invoke name="{name}">{newline}'
        + "".join(
            f'<{mark}parameter name="{k}"'
            + (f' string="{str(isinstance(v, str)).lower()}"' if mark else "")
            + f">{bare(v)}</{mark}parameter>{newline}"
            for k, v in arguments.items()
        )
        + f"</{mark}invoke>"
        for name, arguments in made
    )
    return f"<{section}>{newline}{calls}{newline}</{section}>"


def parse(kind: str, chunks: list[str], cut: bool = False) -> tuple[str, list[list[str]]]:
    """Content, and the calls as [name, arguments]."""
    parser = reader_of(TOOL_FORMATS[kind], SCHEMAS)
    content, found = "", []
    for piece in [*(p for chunk in chunks for p in parser.feed(chunk)), *parser.finish(cut)]:
        if isinstance(piece, str):
            content += piece
        elif piece.name is not None:
            assert piece.index == len(found)
            found.append([piece.name, piece.arguments])
        else:
            found[-1][1] += piece.arguments
    return content, found


def parsed(kind: str, text: str) -> tuple[str, list[Call]]:
    """The same for every way to cut the text in two, and for single characters."""
    whole = parse(kind, [text])
    assert parse(kind, list(text)) == whole
    for i in range(len(text)):
        assert parse(kind, [text[:i], text[i:]]) == whole, f"{text[:i]!r} | {text[i:]!r}"
    return whole[0], [(name, json.loads(arguments)) for name, arguments in whole[1]]


plain = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
awkward = st.sampled_from(
    [
        "",
        "007",
        "true",
        "null",
        "1e5",
        '"quoted"',
        "\n",
        " x\n\n",
        "a</parameter>b",
        "<b>x</b>",
        "</arg_value>!",
        "{'a': 1}",
        "</function> and",
        "日 🙂",
        "\\",
        "<parameter=",
        "</tool_call>",
        "</｜DSML｜parameter>.",
    ]
)
numbers = st.integers(-(10**12), 10**12)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.floats(allow_nan=False, allow_infinity=False) | plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain, inner, max_size=3),
    max_leaves=5,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": plain | awkward,
        "path": plain | awkward,
        "count": numbers,
        "exact": st.booleans(),
        "ratio": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "unit": st.just("kelvin"),
        "filter": st.dictionaries(plain | awkward, values, max_size=3),
        "tags": st.lists(values, max_size=3),
    },
)
calls = st.lists(st.tuples(st.just("write"), arguments) | st.just(("now", {})), min_size=1, max_size=3)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(KINDS), calls, st.sampled_from(["\n", ""]), st.sampled_from(["", "Let me look.\n\n"]))
@example("qwen3_xml", [("write", {"text": "a</parameter>b"})], "\n", "")
@example("glm45", [("now", {}), ("now", {})], "", "")
def test_calls_as_the_families_write_them_are_read_back(kind, made, newline, before):
    content, found = parsed(kind, before + written(kind, made, newline))
    assert (content.strip(), found) == (before.strip(), made)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(KINDS), calls)
def test_a_call_that_is_cut_off_keeps_what_is_known(kind, made):
    text = written(kind, made)
    whole = parse(kind, [text])[1]
    for end in range(len(text)):
        content, found = parse(kind, [text[:end]], cut=True)
        assert (content, found) == parse(kind, [text[: end // 2], text[end // 2 : end]], cut=True)
        assert content.strip() == "", text[:end]
        for (name, given_), (whole_name, whole_arguments) in zip(found, whole, strict=False):
            assert whole_name.startswith(name) and whole_arguments.startswith(given_), text[:end]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("count", "3", 3),
        ("count", " 3.0 ", 3),
        ("count", "many", "many"),
        ("ratio", "2", 2),
        ("ratio", "None", None),
        ("exact", "True", True),
        ("exact", "0", False),
        ("filter", "{'a': [1, True, None]}", {"a": [1, True, None]}),
        ("tags", '["x", 1]', ["x", 1]),
        ("text", "[1, 2]", "[1, 2]"),
        ("mixed", "12", 12),
        ("mixed", "0012", "0012"),
        ("mixed", "twelve", "twelve"),
        ("other", "5", 5),
        ("other", "five", "five"),
        ("other", '{"a": NaN}', '{"a": NaN}'),
        ("tags", "__import__('os')", "__import__('os')"),
    ],
)
def test_values_have_the_kind_of_the_schema(kind, key, text, value):
    made = written(kind, [("write", {key: text})])
    if kind.startswith("deepseek") and not isinstance(value, str):
        made = made.replace('string="true"', 'string="false"')
    assert parsed(kind, made) == ("", [("write", {key: value})])


@pytest.mark.parametrize("kind", KINDS)
def test_texts_come_as_they_are_written(kind):
    whole = written(kind, [("write", {"text": "Once upon a time"})])
    at = whole.index(" upon")
    parser = reader_of(TOOL_FORMATS[kind], SCHEMAS)
    assert parser.feed(whole[:at]) == [CallPiece(0, "write", '{"text": "Once')]
    assert parser.feed(" upon") == [CallPiece(0, None, " upon")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_may_end_with_the_answer_before_its_end_tags(kind):
    whole = written(kind, [("write", {"text": "x", "count": 3})])
    behind = whole.rindex("3") + 1
    for end in range(behind, len(whole)):
        content, found = parsed(kind, whole[:end])
        assert (content.strip(), found) == ("", [("write", {"text": "x", "count": 3})]), whole[:end]


def test_models_that_forget_the_first_tag_call_known_tools():
    text = "Look.\n<function=write>\n<parameter=text>\nx\n</parameter>\n</function>\n</tool_call>"
    assert parsed("qwen3_xml", text) == ("Look.", [("write", {"text": "x"})])
    html = "<function=unknown>\n</function>"
    assert parsed("qwen3_xml", html) == (html, [])


def test_long_texts_take_linear_time():
    """400,000 characters in pieces of four, as a text and inside an object."""
    for made in ({"text": "word </x>\n" * 40_000}, {"filter": {"text": "word </x>" * 40_000}}):
        text = written("qwen3_xml", [("write", made)])
        with cpu_time.at_most(10, time.thread_time):
            _, [(_, found)] = parse("qwen3_xml", [text[i : i + 4] for i in range(0, len(text), 4)])
        assert json.loads(found) == made
