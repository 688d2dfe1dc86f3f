"""Tool calls are found the same however the text is cut, their arguments are exact, and no text is lost."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import cpu_time

from octavo.chat.tools.formats.row import Format
from octavo.chat.tools.formats.table import ROWS, TOOL_FORMATS
from octavo.chat.tools.parsers import CallPiece, JsonListParser, NamedCallParser, Piece, ToolParser, reader_of

HERMES = TOOL_FORMATS["hermes"]
KINDS = [row.name for row in ROWS]
NAMES = ("get_weather", "now", "write.file", "f")
Kind = Format | type[ToolParser]
Parsed = tuple[str, list[tuple[str, str]]]


def add_up(pieces: list[Piece]) -> Parsed:
    """Content, and the calls as (name, arguments); checks that pieces come in order, names first and once."""
    content, calls = "", []
    for piece in pieces:
        if isinstance(piece, str):
            assert piece, "an empty piece of content"
            content += piece
            continue
        assert isinstance(piece, CallPiece)
        if piece.name is not None:
            assert piece.index == len(calls), "calls begin in order"
            calls.append((piece.name, piece.arguments))
        else:
            assert piece.index == len(calls) - 1, "only the last call grows"
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    return content, calls


def parse(kind: Kind, chunks: list[str], names: tuple[str, ...] = NAMES, cut: bool = False) -> Parsed:
    parser = reader_of(kind, names) if isinstance(kind, Format) else kind(names)
    pieces = [piece for chunk in chunks for piece in parser.feed(chunk)]
    return add_up(pieces + parser.finish(cut))


def check_every_cut(kind: Kind, text: str) -> Parsed:
    whole = parse(kind, [text])
    assert parse(kind, list(text)) == whole, "one character at a time"
    for i in range(len(text) + 1):
        assert parse(kind, [text[:i], text[i:]]) == whole, f"cut at {i}: {text[:i]!r} | {text[i:]!r}"
    return whole


# Models' texts.

plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda s: "<" not in s)
awkward = st.sampled_from(
    ['{"a": "}"}', '\\"', "]", "}}", "[TOOL_CALLS]", "<tool_call>", "</tool_call>", "naïve 🙂", "'", ";"]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | plain_text | awkward,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain_text | awkward, inner, max_size=3),
    max_leaves=6,
)
identifiers = st.sampled_from(["city", "days", "unit_2"])
calls = st.tuples(st.sampled_from(NAMES), st.dictionaries(identifiers | plain_text | awkward, json_values, max_size=3))
spellings = st.sampled_from([{}, {"indent": 1}, {"ensure_ascii": False}, {"separators": (",", ":")}])
prose = st.sampled_from(["", "Let me look. ", "One < two, [three] {four} (five)\n\n", "日本語 "])


def as_json(name: str, arguments: dict, spelling: dict, key: str = "arguments", name_first: bool = True) -> str:
    members = {"name": name, key: arguments} if name_first else {key: arguments, "name": name}
    return json.dumps(members, **spelling)


def expected(made: list[tuple[str, dict]]) -> list[tuple[str, dict]]:
    return [(name, json.loads(json.dumps(arguments))) for name, arguments in made]


def check_calls(parsed: Parsed, text: str, made: list[tuple[str, dict]]) -> None:
    content, found = parsed
    assert content.strip() == text.strip()
    assert [(name, json.loads(arguments)) for name, arguments in found] == expected(made)


many_calls = st.lists(calls, min_size=1, max_size=3)


@settings(max_examples=20, deadline=None)
@given(many_calls, prose, spellings, st.booleans(), st.sampled_from(["\n", ""]))
def test_hermes(made, before, spelling, name_first, gap):
    blocks = [f"<tool_call>{gap}{as_json(*call, spelling, name_first=name_first)}{gap}</tool_call>" for call in made]
    check_calls(check_every_cut(HERMES, before + "\n".join(blocks)), before, made)


@settings(max_examples=20, deadline=None)
@given(many_calls, prose, spellings, st.sampled_from(["parameters", "arguments"]), st.sampled_from(["; ", ";", "\n"]))
def test_llama3_json(made, before, spelling, key, separator):
    text = separator.join(as_json(*call, spelling, key) for call in made)
    check_calls(check_every_cut(TOOL_FORMATS["llama3_json"], text), "", made)
    check_calls(check_every_cut(TOOL_FORMATS["llama3_json"], before + "<|python_tag|>" + text), before, made)


@settings(max_examples=8, deadline=None)
@given(many_calls, prose, spellings)
def test_mistral(made, before, spelling):
    parser = TOOL_FORMATS["mistral"]
    listed = "[TOOL_CALLS] [" + ", ".join(as_json(*call, spelling) for call in made) + "]"
    check_calls(check_every_cut(parser, before + listed), before, made)
    named = "".join(f"[TOOL_CALLS]{name}{json.dumps(arguments, **spelling)}" for name, arguments in made)
    check_calls(check_every_cut(parser, before + named), before, made)
    marked = "".join(f"[TOOL_CALLS]{name}[CALL_ID]a1B[ARGS]{json.dumps(arguments)}" for name, arguments in made)
    check_calls(check_every_cut(parser, before + marked), before, made)


pythonic_calls = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(identifiers, json_values, max_size=3)), min_size=1, max_size=3
)


@settings(max_examples=20, deadline=None)
@given(pythonic_calls, prose)
def test_pythonic(made, before):
    written = [f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in made]
    text = f"[{', '.join(written)}]"
    parser = TOOL_FORMATS["pythonic"]
    check_calls(check_every_cut(parser, text), "", made)
    check_calls(check_every_cut(parser, f"{before}<|python_start|>{text}<|python_end|>"), before, made)


@settings(max_examples=20, deadline=None)
@given(many_calls, spellings)
def test_a_constrained_list(made, spelling):
    text = json.dumps([{"name": name, "parameters": arguments} for name, arguments in made], **spelling)
    check_calls(check_every_cut(JsonListParser, text), "", made)


# Answers that are cut off at max_tokens.


def check_every_end(kind: Kind, text: str, before: str = "", names: tuple[str, ...] = NAMES) -> None:
    """Wherever ``text``, which is ``before`` and calls, ends: no markup is content, and the calls are those of the
    whole text, the last one as far as it came."""
    _, whole = parse(kind, [text], names)
    for end in range(len(text) + 1):
        content, calls = parsed = parse(kind, [text[:end]], names, cut=True)
        shown = f"{text[:end]!r}: {parsed}"
        middle = end * 2 // 3
        assert parse(kind, [text[:middle], text[middle:end]], names, cut=True) == parsed, shown
        assert before.startswith(content), shown
        assert [name for name, _ in calls[:-1]] == [name for name, _ in whole[: len(calls)]][:-1], shown
        for (name, arguments), (whole_name, whole_arguments) in zip(calls, whole, strict=False):
            assert whole_name.startswith(name) and whole_arguments.startswith(arguments), shown


@settings(max_examples=5, deadline=None)
@given(st.data(), st.lists(calls, min_size=1, max_size=2), prose, spellings)
def test_calls_that_are_cut_off_keep_what_is_known(data, made, before, spelling):
    """In every format: the name or its beginning, and the beginning of the arguments."""
    written = [as_json(*call, spelling, name_first=data.draw(st.booleans())) for call in made]
    check_every_end(HERMES, before + "\n".join(f"<tool_call>{call}</tool_call>" for call in written), before)
    check_every_end(TOOL_FORMATS["mistral"], f"{before}[TOOL_CALLS] [{', '.join(written)}]", before)
    named = "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, **spelling)}" for name, arguments in made)
    check_every_end(TOOL_FORMATS["mistral"], before + named, before)
    llama = "; ".join(as_json(*call, spelling, "parameters") for call in made)
    check_every_end(TOOL_FORMATS["llama3_json"], llama)
    check_every_end(TOOL_FORMATS["llama3_json"], before + "<|python_tag|>" + llama, before)
    listed = json.dumps([{"name": name, "parameters": arguments} for name, arguments in made], **spelling)
    check_every_end(JsonListParser, listed)
    check_every_end(NamedCallParser, json.dumps(made[0][1], **spelling), names=NAMES[:1])


@settings(max_examples=5, deadline=None)
@given(pythonic_calls, prose)
def test_calls_in_python_that_are_cut_off_keep_whole_arguments(made, before):
    written = [f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in made]
    check_every_end(TOOL_FORMATS["pythonic"], f"[{', '.join(written)}]")
    check_every_end(TOOL_FORMATS["pythonic"], f"{before}<|python_start|>[{', '.join(written)}]", before)


@pytest.mark.parametrize(
    ("kind", "text", "calls"),
    [
        (HERMES, "<tool_call>", []),
        (HERMES, '<tool_call>{"name": "w', [("write.file", "")]),  # only one begins so
        (HERMES, '<tool_call>{"name": "new_too', [("new_too", "")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a', [("f", "")]),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "w', [("write.file", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": Tru', [("f", '{"a": ')]),  # no JSON begins so
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": -1', [("f", '{"a": -1')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool', [("f", "{}")]),
        (TOOL_FORMATS["llama3_json"], '{"na', []),
        (TOOL_FORMATS["mistral"], "[TOOL_CALLS]get", [("get_weather", "")]),
        (TOOL_FORMATS["pythonic"], "[f(a=[1, 2], b='x, y', c=(3", [("f", '{"a": [1, 2], "b": "x, y"')]),
        (JsonListParser, "[", []),
        (JsonListParser, ' [{"name": "now", "parameters"', [("now", "")]),
    ],
)
def test_how_far_a_call_came(kind, text, calls):
    assert parse(kind, [text], cut=True) == parse(kind, list(text), cut=True) == ("", calls)


def test_a_call_of_the_only_tool_has_its_name_from_the_beginning():
    for kind, text in ((JsonListParser, "["), (NamedCallParser, " "), (NamedCallParser, "{"), (HERMES, "<tool_call>")):
        _, [(name, arguments)] = parse(kind, [text], ("now",), cut=True)
        assert name == "now" and arguments in ("", "{")
        assert parse(kind, [], ("now",), cut=True) == ("", []), "no text, no call"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["Paris", '{"city": "Par', '{"name": "Jane", "age', "[1, 2", "a < b and ", "  "])
def test_other_texts_that_are_cut_off_are_content(kind, text):
    content, calls = parse(TOOL_FORMATS[kind], [text], cut=True)
    assert (content, calls) == (text, [])


MARKUP = [
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_start|>",
    '{"name": "f"',
    '"name"',
    '"arguments": ',
    '{"a": 1}',
    '{"name": "f", "arguments": ',
    "{",
    "}",
    "[",
    "]",
    "f(",
    ")",
    "f(a=1)",
    "<function=f>",
    "<parameter=a>",
    "</parameter>",
    "</function>",
    "<arg_key>a</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<｜tool▁call▁begin｜>",
    "f<｜tool▁sep｜>",
    "<minimax:tool_call>",
    '<invoke name="f">',
    '<parameter name="a">',
    "</invoke>",
    "</minimax:tool_call>",
    "<|tool_call|>",
    "a=",
    ",",
    ";",
    ":",
    '"',
    "\\",
    "'''",
    "\n",
    " ",
    "\\u00e",
    "tru",
    "nul",
    "1.",
    "-",
    "x",
    "🙂",
    "\ud800",
    "\\ud800",
]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(KINDS), st.lists(st.sampled_from(MARKUP), max_size=10).map("".join))
@example("hermes", '<tool_call>{"name": "f", "arguments": {"a": tru')
@example("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\')
@example("mistral", '[TOOL_CALLS]f{"a": "b"} and [TOOL_CALLS]')
def test_any_text_is_parsed_alike_however_it_is_cut(kind, text):
    check_every_cut(TOOL_FORMATS[kind], text)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(KINDS), st.text(max_size=40))
def test_text_without_a_call_comes_out_as_it_is(kind, text):
    assert check_every_cut(TOOL_FORMATS[kind], text) == (text, [])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "  \n ",
        "Paris.",
        ' {"city": "Paris"} ',
        '{"name": "Jane", "parameters": {"age": 7}}',  # an answer in JSON that names no tool
        "[1, 2, 3]",
        "[see (a) and (b)]",
        '<tool_call>is "now"</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "\\ud800"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>',
        '<|python_tag|>print("hello")',
        "[TOOL_CALLS]",
        "[TOOL_CALLS]f",
        "[TOOL_CALLS][{}]",
        "[f(x)]",
        "[f(1)]",
        '[f(a=__import__("os"))]',
        "[f(a=b'1')]",
        "[f(a=1) for f in g]",
        "[f(**{'a': 1})]",
        "[f(a=1e999)]",
        "[f(a=" + "(" * 10_000,
        "[f(a=" + "-" * 50_000 + "1)]",
        "[f(a=" + "9" * 10_000 + ")]",
    ],
)
def test_text_that_is_no_call_is_content_to_the_letter(kind, text):
    names = (*NAMES,)
    assert parse(TOOL_FORMATS[kind], [text], names) == (text, [])


def hermes(body: str) -> Parsed:
    return check_every_cut(HERMES, f"<tool_call>{body}</tool_call>")


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "now"}', "{}"),
        ('{"name": "now", "arguments": {}}', "{}"),
        ('{"name": "now", "arguments": null}', "{}"),
        ('{"name": "now", "arguments": ""}', "{}"),
        ('{"name": "now", "arguments": "{}"}', "{}"),
        ('{"name": "now", "arguments": {"a": "}{"}}', '{"a": "}{"}'),
        ('{"name": "now", "arguments": {"a": "\\"}</tool_call>"}}', '{"a": "\\"}</tool_call>"}'),
        ('{"arguments": "{\\"a\\": \\"}\\"}", "id": 7, "name": "now"}', '{"a": "}"}'),
        ('{"name": "now", "arguments": {"a": 1e3, "b": [true, null]}}', '{"a": 1e3, "b": [true, null]}'),
        ('{"name": "now", "arguments": {"a": 1}', '{"a": 1}'),  # a brace too few
        ('{"name": "now", "arguments": {"a": 1}}}', '{"a": 1}'),  # a brace too many
        ('{"name": "now", "arguments": {"a": "x\ny\td"}}', '{"a": "x\\ny\\td"}'),  # not escaped by the model
        ('{"name": "now", "arguments": {"a": "\\d+ it\\\'s"}}', '{"a": "\\\\d+ it\'s"}'),
    ],
)
def test_arguments_are_exact(body, arguments):
    assert hermes(body) == ("", [("now", arguments)])


def test_arguments_come_as_they_are_written():
    """A long argument need not be whole before its beginning is seen."""
    parser = reader_of(HERMES, NAMES)
    assert parser.feed('Wait. <tool_call>\n{"name": "f", "arg') == ["Wait."]
    assert parser.feed('uments": {"text": "Once') == [CallPiece(0, "f", '{"text": "Once')]
    assert parser.feed(" upon") == [CallPiece(0, None, " upon")]
    assert parser.feed(' a time"}') == [CallPiece(0, None, ' a time"}')]
    assert parser.feed("}\n</tool_call>") == [] == parser.finish()


def test_text_that_cannot_be_a_marker_is_not_held_back():
    parser = reader_of(HERMES, NAMES)
    assert parser.feed("a <to") == ["a"]  # the space waits: before a call it would be dropped
    assert parser.feed("n>") == [" <ton>"]


def test_a_call_that_is_cut_off_shows_how_far_it_came():
    text = '<tool_call>{"name": "f", "arguments": {"a": [1, tru'
    assert check_every_cut(HERMES, text) == ("", [("f", '{"a": [1, tru')])
    too_early = '<tool_call>{"name": "f", "argum'
    assert check_every_cut(HERMES, too_early) == (too_early, [])


def test_a_broken_call_spares_its_neighbours():
    good = '<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
    bad = '<tool_call>{"name": now}</tool_call>'
    content, found = check_every_cut(HERMES, good + bad + good)
    assert content == bad and found == [("now", '{"a": 1}')] * 2


def test_a_call_that_breaks_inside_arguments_becomes_content():
    content, found = hermes('{"name": "now", "arguments": {"a": 1,}}')
    assert found == [("now", '{"a": 1,')] and content == "}}</tool_call>"


def test_unknown_tools_count_where_calls_are_marked():
    body = '{"name": "made_up", "arguments": {}}'
    assert hermes(body)[1] == [("made_up", "{}")]
    assert check_every_cut(TOOL_FORMATS["llama3_json"], body) == (body, [])


def test_long_arguments_take_linear_time():
    """200,000 characters in pieces of four."""
    text = '<tool_call>{"name": "f", "arguments": {"text": "' + "word \\n" * 28_000 + '"}}</tool_call>'
    with cpu_time.at_most(5, time.thread_time):
        content, found = parse(HERMES, [text[i : i + 4] for i in range(0, len(text), 4)])
    assert content == "" and len(json.loads(found[0][1])["text"]) == 6 * 28_000
