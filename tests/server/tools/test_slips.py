"""Slips of models in their own formats: forgotten words and tags, other kinds of value. A call stays a call."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from octavo.chat.tools.formats.table import TOOL_FORMATS
from octavo.chat.tools.formats.writer import write_calls
from octavo.chat.tools.parsers import CallPiece, reader_of

SCHEMAS: dict[str, dict[str, Any]] = {
    "note": {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "body": {"type": "string"},
            "stars": {"type": "integer"},
            "more": {},
        },
    },
    "now": {"type": "object", "properties": {}},
}
NOW = [("now", {})]
MARK = "｜DSML｜"
TEXT = ' string="true"'  # an attribute


def read(row: str, text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]]]:
    reader, content, calls = reader_of(TOOL_FORMATS[row], SCHEMAS), "", list[tuple[str, str]]()
    chunks = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for piece in [*(piece for chunk in chunks for piece in reader.feed(chunk)), *reader.finish()]:
        if isinstance(piece, str):
            content += piece
        elif isinstance(piece, CallPiece) and piece.name is not None:
            calls.append((piece.name, piece.arguments))
        elif isinstance(piece, CallPiece):
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    return content, calls


def read_in_every_cut(row: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    whole = read(row, text, [])
    assert read(row, text, list(range(1, len(text)))) == whole
    for at in range(1, len(text)):
        assert read(row, text, [at]) == whole, f"{text[:at]!r} | {text[at:]!r}"
    return whole[0], [(name, json.loads(arguments)) for name, arguments in whole[1]]


def dsml(*parameters: str, section: bool = True) -> str:
    call = f'<{MARK}invoke name="note">\n' + "".join(f"{one}\n" for one in parameters) + f"</{MARK}invoke>"
    return f"<{MARK}tool_calls>\n{call}\n</{MARK}tool_calls>" if section else call


def parameter(key: str, told: str, value: str) -> str:
    return f'<{MARK}parameter name="{key}"{told}>{value}</{MARK}parameter>'


FORGOTTEN_WORDS = [
    ("kimi_k2", "<|tool_call_begin|> functions.now : 0 <|tool_call_argument_begin|> {} <|tool_call_end|>", NOW),
    ("kimi_k2", "<|tool_call_begin|>now:0<|tool_call_argument_begin|>{}<|tool_call_end|>", NOW),
    ("gemma4", "<|tool_call>:now{}<tool_call|>", NOW),
    ("gemma4", '<|tool_call>note{title:<|"|>a: b<|"|>}<tool_call|>', [("note", {"title": "a: b"})]),
    ("granite", '<tool_call>[{"name": "now", "arguments": {}}]', NOW),
    ("xlam", '[TOOL_CALLS][{"name": "now", "arguments": {}}]', NOW),
]


@pytest.mark.parametrize(("row", "text", "calls"), FORGOTTEN_WORDS)
def test_calls_without_a_word_of_their_header_are_read(row, text, calls):
    assert read_in_every_cut(row, f"Look. {text}") == ("Look.", calls)


@pytest.mark.parametrize("text", ["<|tool_call>:never{}<tool_call|>", "<|tool_call>never{}<tool_call|>"])
def test_headers_without_a_word_call_known_tools_only(text):
    assert read_in_every_cut("gemma4", text) == (text, [])


UNCLOSED = [
    ("qwen3_xml", "<tool_call>\n<function=note>\n<parameter=title>\nSun", "\n<parameter=body>\nRain\n</parameter>\n"
     "</function>\n</tool_call>"),
    ("seed_oss", "<seed:tool_call>\n<function=note>\n<parameter=title>Sun", "\n<parameter=body>Rain</parameter>\n"
     "</function>\n</seed:tool_call>"),
    ("glm45", "<tool_call>note\n<arg_key>title</arg_key>\n<arg_value>Sun", "<arg_key>body</arg_key>\n<arg_value>Rain"
     "</arg_value>\n</tool_call>"),
    ("deepseek_v4", f'<{MARK}tool_calls>\n<{MARK}invoke name="note">\n<{MARK}parameter name="title" string="true">Sun',
     f"\n{parameter('body', TEXT, 'Rain')}\n</{MARK}invoke>\n</{MARK}tool_calls>"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "begin", "rest"), UNCLOSED, ids=[row for row, *_ in UNCLOSED])
def test_a_value_without_its_end_tag_ends_where_the_next_argument_begins(row, begin, rest):
    assert read_in_every_cut(row, begin + rest) == ("", [("note", {"title": "Sun", "body": "Rain"})])
    # What only looks like an argument is text: of another name, or of one that the call has already.
    for other in ("other", "title"):
        text = f"Sun{rest.partition('Rain')[0].replace('body', other)}"
        assert read_in_every_cut(row, begin + text.removeprefix("Sun") + rest) == (
            "",
            [("note", {"title": text, "body": "Rain"})],
        )


@pytest.mark.parametrize(("row", "begin", "rest"), UNCLOSED, ids=[row for row, *_ in UNCLOSED])
def test_an_empty_value_without_its_end_tag_ends_where_the_next_argument_begins(row, begin, rest):
    empty = begin.removesuffix("Sun").rstrip("\n")
    assert read_in_every_cut(row, empty + rest) == ("", [("note", {"title": "", "body": "Rain"})])


@pytest.mark.parametrize(("row", "begin", "rest"), UNCLOSED, ids=[row for row, *_ in UNCLOSED])
def test_a_value_may_quote_the_tag_of_an_argument_to_come_inside_a_line(row, begin, rest):
    tags = TOOL_FORMATS[row].arguments
    quote = f" and {rest.partition('Rain')[0].strip()}x{tags.value_end} too"
    text = f"{begin}{quote}{tags.value_end}{rest}"
    assert read_in_every_cut(row, text) == ("", [("note", {"title": f"Sun{quote}", "body": "Rain"})])


QUOTES = [
    ("glm45", "<tool_call>note\n<arg_key>title</arg_key>\n<arg_value>", "<arg_key>body</arg_key>", "</arg_value>\n"
     "</tool_call>"),
    ("step3", '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="note">'
     '<steptml:parameter name="title">', '<steptml:parameter name="body">', "</steptml:parameter></steptml:invoke>"
     "<｜tool_call_end｜><｜tool_calls_end｜>"),
    ("qwen3_xml", "<tool_call>\n<function=note>\n<parameter=title>\n",
     "On a line:\n<parameter=body>", "\n</parameter>\n"
     "</function>\n</tool_call>"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "begin", "tag", "end"), QUOTES, ids=[row for row, *_ in QUOTES])
def test_a_value_may_quote_the_tag_of_an_argument_that_comes_behind_it(row, begin, tag, end):
    tags, last = TOOL_FORMATS[row].arguments, tag.splitlines()[-1]
    more = f"{tags.newline}{last}{tags.value}Rain"
    text = f"{begin}{tag} is it{end.partition(tags.value_end)[0]}{tags.value_end}{more}{end}"
    assert read_in_every_cut(row, text) == ("", [("note", {"title": f"{tag} is it", "body": "Rain"})])


def test_many_quotes_of_an_argument_to_come_take_linear_time():
    """In steps of the interpreter: of four times as many quotes at most six times as many."""
    _, begin, tag, end = QUOTES[2]

    def steps(quotes: int) -> int:
        count, quoted = 0, f"{tag}\nx</parameter>y" * quotes
        last = f"\n{tag.splitlines()[-1]}Rain"
        text = f"{begin}{quoted}{end.partition('</function>')[0].rstrip()}{last}{end}"

        def count_one(*_: Any) -> None:
            nonlocal count
            count += 1

        before = sys.getprofile()
        sys.setprofile(count_one)
        try:
            found = read("qwen3_xml", text, [len(text) // 2])
        finally:
            sys.setprofile(before)
        assert [json.loads(arguments) for _, arguments in found[1]] == [{"title": quoted, "body": "Rain"}]
        return count

    assert steps(200) < 6 * steps(50)


def test_a_value_may_quote_the_key_of_an_argument_that_never_comes():
    row, begin, tag, end = QUOTES[0]
    assert read_in_every_cut(row, f"{begin}{tag} is it{end}") == ("", [("note", {"title": f"{tag} is it"})])


def test_signs_in_names_that_stand_in_quotes_are_read_and_written():
    schemas = {"r&d": {"type": "object", "properties": {"a&b": {"type": "string"}, '"q"': {"type": "integer"}}}}
    text = write_calls(TOOL_FORMATS["kimi_k3"], [("r&d", {"a&b": "x &amp; y", '"q"': 3})])
    assert 'tool="r&amp;d"' in text and 'key="&quot;q&quot;"' in text
    for size in (1, 2, 3, len(text)):
        reader = reader_of(TOOL_FORMATS["kimi_k3"], schemas)
        pieces = [piece for at in range(0, len(text), size) for piece in reader.feed(text[at : at + size])]
        calls = [piece for piece in [*pieces, *reader.finish()] if isinstance(piece, CallPiece)]
        assert "".join(call.name or "" for call in calls) == "r&d"
        assert json.loads("".join(call.arguments for call in calls)) == {"a&b": "x &amp; y", '"q"': 3}


@pytest.mark.parametrize(("told", "key", "value"), [("", "title", "4"), ("", "stars", 4), ("number", "stars", 4)])
def test_a_kind_in_tags_of_its_own_may_be_missing(told, key, value):
    kind = f"<ifm|arg_type>{told}</ifm|arg_type>" if told else ""
    call = f"<ifm|tool_call>note<ifm|arg_key>{key}</ifm|arg_key>{kind}<ifm|arg_value>4</ifm|arg_value></ifm|tool_call>"
    text = f"<ifm|tool_calls>{call}</ifm|tool_calls>"
    assert read_in_every_cut("k2_horizon", text) == ("", [("note", {key: value})])


@pytest.mark.parametrize(
    ("told", "key", "value", "expected"),
    [
        (TEXT, "stars", "4", 4),
        (TEXT, "title", "4", "4"),
        (TEXT, "more", "4", "4"),
        (' string="false"', "title", "null", "null"),
        (' string="false"', "more", "null", None),
        ("", "title", "4", "4"),
        ("", "stars", "4", 4),
        ("", "more", "[4]", [4]),
    ],
)
def test_the_schema_decides_where_a_model_tells_another_kind_of_value(told, key, value, expected):
    text = dsml(parameter(key, told, value))
    assert read_in_every_cut("deepseek_v4", text) == ("", [("note", {key: expected})])


def test_a_call_without_its_section_is_a_call_of_a_known_tool():
    call = dsml(parameter("title", TEXT, "Sun"), section=False)
    assert read_in_every_cut("deepseek_v4", f"Look.\n{call}") == ("Look.", [("note", {"title": "Sun"})])
    unknown = call.replace('"note"', '"never"')
    assert read_in_every_cut("deepseek_v4", unknown) == (unknown, [])


@pytest.mark.parametrize(
    ("source", "given"),
    [
        ("stars=007", {"stars": 7}),
        ("stars=0, title='007 0.5'", {"stars": 0, "title": "007 0.5"}),
        ("more={'a', 'b'}", {"more": ["a", "b"]}),
        ("title='a\0b'", {"title": "a\0b"}),
        ("more=[010, 0.5, -08]", {"more": [10, 0.5, -8]}),
    ],
)
def test_arguments_that_are_not_quite_python_are_read(source, given):
    text = f"<|tool_call_start|>[note({source})]<|tool_call_end|>"
    assert read_in_every_cut("lfm2", text) == ("", [("note", given)])


def test_elements_that_repeat_where_the_schema_is_silent_are_a_list():
    mark = "]<]minimax[>["

    def element(tag: str, inner: str) -> str:
        return f"{mark}<{tag}>{inner}{mark}</{tag}>"

    inner = element("more", element("a", "x") + element("a", "y")) + element("stars", "007")
    text = f'{mark}<tool_call>\n{mark}<invoke name="note">{inner}{mark}</invoke>\n{mark}</tool_call>'
    assert read_in_every_cut("minimax_m3", text) == ("", [("note", {"more": {"a": ["x", "y"]}, "stars": 7})])
