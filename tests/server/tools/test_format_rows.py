"""Every row of the table of formats: what its writer writes its reader reads back, however the text is cut, and what is
no call of it stays in the text."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from octavo.chat.answer import AnswerParser
from octavo.chat.reasoning import ReasoningParser
from octavo.chat.thought_tags import THINK, THOUGHT_TAGS, ThoughtTags
from octavo.chat.tools.formats.row import Elements, Format, Harmony, Params, Python, Typed
from octavo.chat.tools.formats.table import ROWS, TOOL_FORMATS
from octavo.chat.tools.formats.writer import Call, write_calls
from octavo.chat.tools.parsers import CallPiece, Reasoning, reader_of, reader_of_marks
from octavo.chat.tools.parsers.harmony import MARKS
from octavo.chat.tools.plan import ToolPlan
from octavo.interface.outputs import CompletionOutput

SCHEMAS: dict[str, dict[str, Any]] = {
    "write": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "ratio": {"type": ["number", "null"]},
            "exact": {"type": "boolean"},
            "filter": {
                "type": "object",
                "properties": {"of": {"type": "array", "items": {"type": "string"}}, "deep": {"type": "boolean"}},
            },
            "tags": {"type": "array", "items": {"type": "string"}},
        },
    },
    "now": {"type": "object", "properties": {}},
}
READ = [row for row in ROWS if not isinstance(row.arguments, Harmony)]
NAMES = [row.name for row in READ]

plain = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=8)
awkward = st.sampled_from(
    [
        "",
        "007",
        "true",
        "null",
        "1e5",
        '"',
        "it's",
        "\n",
        " x\n\n",
        "<b>x</b>",
        "{'a': 1}",
        "</tool_call>",
        "日 🙂",
        "\\",
    ]
)
texts = plain | awkward
calls = st.lists(
    st.tuples(
        st.just("write"),
        st.fixed_dictionaries(
            {},
            optional={
                "text": texts,
                "count": st.integers(-(10**12), 10**12),
                "ratio": st.none() | st.floats(allow_nan=False, allow_infinity=False),
                "exact": st.booleans(),
                "filter": st.fixed_dictionaries(
                    {"of": st.lists(texts, min_size=1, max_size=2)}, optional={"deep": st.booleans()}
                ),
                "tags": st.lists(texts, min_size=1, max_size=3),
            },
        ),
    )
    | st.just(("now", {})),
    min_size=1,
    max_size=3,
)


def read(row: Format, chunks: list[str]) -> tuple[str, str, list[Call]]:
    """Content, thoughts and calls."""
    reader = reader_of(row, SCHEMAS)
    content, thoughts = "", ""
    found: list[tuple[str, str]] = []
    for piece in [*(piece for chunk in chunks for piece in reader.feed(chunk)), *reader.finish()]:
        if isinstance(piece, str):
            content += piece
        elif isinstance(piece, Reasoning):
            thoughts += piece.text
        elif piece.name is not None:
            found.append((piece.name, piece.arguments))
        else:
            found[-1] = (found[-1][0], found[-1][1] + piece.arguments)
    return content, thoughts, [(name, json.loads(arguments)) for name, arguments in found]


def read_in_all_cuts(row: Format, text: str, cuts: int = 60) -> tuple[str, str, list[Call]]:
    """The same for single characters, for pieces of random lengths and for every way to cut the beginning in two."""
    whole = read(row, [text])
    assert read(row, list(text)) == whole
    rng, at, pieces = random.Random(text), 0, []
    while at < len(text):
        pieces.append(text[at : (at := at + rng.randint(1, 9))])
    assert read(row, pieces) == whole
    for i in range(min(len(text), cuts)):
        assert read(row, [text[:i], text[i:]]) == whole, f"{text[:i]!r} | {text[i:]!r}"
    return whole


def can_write(row: Format, made: list[Call]) -> bool:
    """False for texts that a format without escapes cannot hold."""
    text = json.dumps(made, ensure_ascii=False)
    if isinstance(row.arguments, Params | Typed | Elements):
        ends = ("<![CDATA[", "]]>") if isinstance(row.arguments, Params) and row.arguments.cdata else ()
        return not any(mark in text for mark in ends)
    return True


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5, deadline=None)
@given(calls, st.sampled_from(["", "Let me look.\n\n"]))
@example([("write", {"text": "x", "filter": {"of": ["a"]}}), ("now", {}), ("write", {"tags": ["b"]})], "")
def test_calls_that_a_row_writes_are_read_back(name, made, before):
    check_read_back(TOOL_FORMATS[name], made, before)


def check_read_back(row: Format, made: list[Call], before: str, cuts: int = 60) -> None:
    if not can_write(row, made) or (row.begins and before):
        return
    content, _, found = read_in_all_cuts(row, before + write_calls(row, made), cuts)
    assert (content.strip(), found) == (before.strip(), made)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls, st.sampled_from(["", "Let me look.\n\n", "a < b, [1] and {2}: "]))
def test_ten_thousand_answers_of_a_row_are_read_back_in_every_cut(name, made, before):
    check_read_back(TOOL_FORMATS[name], made, before, cuts=200)


def written_answer(row: Format, thoughts: str, before: str, made: list[Call]) -> str:
    """An answer with thoughts, text and calls."""
    tags = tags_of(row)
    if isinstance(row.arguments, Harmony):
        messages = [f"analysis<|message|>{thoughts}<|end|>"] * bool(thoughts)
        messages += [f"commentary<|message|>{before}<|end|>"] * bool(before)
        messages += [
            f"commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
            for name, arguments in made
        ]
        return "<|channel|>" + "<|start|>assistant<|channel|>".join(messages)
    lead = f"{tags.opening}\n{thoughts}\n{tags.closing}" if thoughts else ""
    lead += f"{row.texts[0]} " if row.addressed and thoughts else ""
    return lead + before + write_calls(row, made)


def tags_of(row: Format) -> ThoughtTags:
    return next((tags for tags in THOUGHT_TAGS if row.name in tags.names), THINK)


def read_answer(row: Format, chunks: list[str]) -> tuple[str, str, list[Call]]:
    """Thoughts, content and calls, read as a server does."""
    harmony = isinstance(row.arguments, Harmony)
    reasoning = None if harmony else ReasoningParser(False, lambda: reader_of(row, SCHEMAS), tags_of(row))
    plan = ToolPlan(row, tuple(SCHEMAS), None)
    parser = AnswerParser(reasoning, reader_of(row, SCHEMAS), plan)
    thoughts, content, found = "", "", list[list[str]]()
    for chunk in [*chunks, None]:
        delta = parser.feed(CompletionOutput(0, chunk or "", [], finish_reason="stop" if chunk is None else None))
        thoughts, content = thoughts + delta.reasoning, content + delta.content
        for call in delta.calls:
            if call.name is not None:
                found.append([call.name, ""])
            found[-1][1] += call.arguments
    return thoughts.strip(), content.strip(), [(name, json.loads(arguments)) for name, arguments in found]


def tokens_of(row: Format, text: str) -> list[str]:
    """A text cut where a vocabulary may cut it that has the row's marks as tokens: each is whole."""
    kind = row.arguments
    values = [getattr(kind, name, "") for name in ("key", "value", "value_end", "quote", "mark")]
    harmony = MARKS if isinstance(kind, Harmony) else ()
    marks = {*harmony, *tags_of(row).around, *row.marks, *row.section, row.call, row.call_end, *values} - {""}
    cut = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
    rng, at, found = random.Random(text), 0, list[str]()
    while at < len(text):
        mark, following = cut.match(text, at), cut.search(text, at)
        end = mark.end() if mark else min(at + rng.randint(1, 7), following.start() if following else len(text))
        found.append(text[at:end])
        at = end
    return found


def check_answer(row: Format, thoughts: str, before: str, made: list[Call]) -> None:
    if not can_write(row, made) or row.begun or (before and (row.begins or row.addressed)):
        return
    text = written_answer(row, thoughts, before, made)
    expected = (thoughts.strip(), before.strip(), made)
    assert read_answer(row, [text]) == expected
    assert read_answer(row, list(text)) == expected
    assert read_answer(row, tokens_of(row, text)) == expected


answers = st.tuples(
    st.sampled_from(["", "I wonder.", "a < b,\n\n{c} and [d]", "日 🙂"]),
    st.sampled_from(["", "Let me look.\n\n", "a < b, [1] and {2}: "]),
    calls,
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@settings(max_examples=5, deadline=None)
@given(answers)
@example(("I wonder.", "Let me look.\n", [("write", {"text": "x", "filter": {"of": ["a"]}}), ("now", {})]))
@example(("I wonder.", "", [("now", {})]))
def test_answers_with_thoughts_are_read_back_in_characters_and_in_tokens(row, answer):
    check_answer(row, *answer)


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(answers)
def test_ten_thousand_answers_with_thoughts_are_read_back_in_characters_and_in_tokens(row, answer):
    check_answer(row, *answer)


@pytest.mark.parametrize("name", NAMES)
def test_a_call_whose_arguments_are_missing_or_broken_stays_in_the_text(name):
    row = TOOL_FORMATS[name]
    whole = write_calls(row, [("write", {"text": "x", "count": 3})])
    before, _, behind = whole.partition("write")
    for text in (before + "!?" + behind[:0], before, before + "\n\nI would rather not."):
        content, thoughts, found = read_in_all_cuts(row, "So: " + text)
        assert (content, thoughts, found) == ("So: " + text, "", [])


@pytest.mark.parametrize("name", [row.name for row in READ if row.known_only])
def test_without_a_sure_marker_only_offered_tools_are_called(name):
    text = write_calls(TOOL_FORMATS[name], [("unheard_of", {"a": 1})])
    assert read_in_all_cuts(TOOL_FORMATS[name], text) == (text, "", [])


@pytest.mark.parametrize("name", [row.name for row in READ if row.thoughts[0]])
def test_thoughts_between_marks_of_the_row_are_no_content(name):
    row = TOOL_FORMATS[name]
    begin, end = row.thoughts
    call = write_calls(row, [("now", {})])
    assert read_in_all_cuts(row, f"{begin}I wonder.{end}Look. {call}") == ("Look.", "I wonder.", [("now", {})])
    assert read_in_all_cuts(row, f"{begin}I wonder.{call}") == ("", "I wonder.", [("now", {})]), "not closed"


@pytest.mark.parametrize("row", [row for row in ROWS if row.marks], ids=lambda row: row.name)
def test_an_answer_without_tools_keeps_its_last_characters_where_a_limit_ends_it(row):
    for text in (f"if a {mark[:length]}" for mark in row.marks for length in range(1, len(mark))):
        reader = reader_of_marks(row)
        assert "".join(map(str, [*reader.feed(text), *reader.finish(cut=True)])) == text


@pytest.mark.parametrize("name", [row.name for row in READ if isinstance(row.arguments, Typed | Elements)])
def test_arguments_come_as_they_are_written(name):
    whole = write_calls(TOOL_FORMATS[name], [("write", {"text": "Once upon a time"})])
    at = whole.index(" upon")
    reader = reader_of(TOOL_FORMATS[name], SCHEMAS)
    assert reader.feed(whole[:at]) == [CallPiece(0, "write", '{"text": "Once')]
    assert reader.feed(" upon") == [CallPiece(0, None, " upon")]


@pytest.mark.parametrize("name", [row.name for row in READ if isinstance(row.arguments, Typed | Elements | Params)])
def test_a_call_that_is_cut_off_keeps_what_is_certain(name):
    text = write_calls(TOOL_FORMATS[name], [("write", {"text": "Once", "filter": {"of": ["a"]}, "tags": ["b"]})])
    whole = read(TOOL_FORMATS[name], [text])[2]
    for end in range(len(text)):
        reader = reader_of(TOOL_FORMATS[name], SCHEMAS)
        pieces = [*reader.feed(text[:end]), *reader.finish(cut=True)]
        given_ = "".join(piece.arguments for piece in pieces if isinstance(piece, CallPiece))
        assert not any(isinstance(piece, str) and piece.strip() for piece in pieces), text[:end]
        assert json.dumps(whole[0][1], ensure_ascii=False).startswith(given_), text[:end]


def test_an_id_in_a_header_is_the_calls_id():
    reader = reader_of(TOOL_FORMATS["kimi_k2"], SCHEMAS)
    pieces = reader.feed(write_calls(TOOL_FORMATS["kimi_k2"], [("now", {})] * 2, first=7))
    assert [piece.id for piece in pieces] == ["functions.now:7", "functions.now:8"]


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("'It's so'", "It's so"),
        ("'x = \"1\"\n  y = 'é''", "x = \"1\"\n  y = 'é'"),
        ("'a \\' b'", "a ' b"),
        ("['it's', 'b']", ["it's", "b"]),
    ],
)
def test_texts_that_a_template_wrote_in_quotes_without_escapes_are_read(source, value):
    text = f"<|tool_call_start|>[write(text={source}, count=1)]<|tool_call_end|>"
    assert read_in_all_cuts(TOOL_FORMATS["lfm2"], text) == ("", "", [("write", {"text": value, "count": 1})])


def test_names_are_unique_and_rows_have_a_marker_or_a_beginning():
    assert len(TOOL_FORMATS) == sum(1 + len(row.aliases) for row in ROWS)
    for row in READ:
        assert row.markers or row.begins, row.name
        assert not isinstance(row.arguments, Python) or row.known_only, row.name
