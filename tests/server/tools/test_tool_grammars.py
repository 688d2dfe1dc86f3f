"""Where an answer must have a form, its grammar leaves room for calls in every model's way of writing them: what the
grammar lets through, the parser takes for calls that keep to the tools' schemas."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer

from octavo.chat.messages import Conversation
from octavo.chat.options import ChatOptions
from octavo.chat.render import Rendered
from octavo.chat.structured import or_calls
from octavo.chat.tools.formats.row import Json, JsonKey, Named, Params
from octavo.chat.tools.formats.table import ROWS, TOOL_FORMATS
from octavo.chat.tools.formats.writer import write_calls
from octavo.chat.tools.grammars import call_grammar
from octavo.chat.tools.parsers import CallPiece, NamedCallParser, Piece, reader_of
from octavo.chat.tools.plan import ToolPlan, combine_constraints, plan_tools
from octavo.errors import FieldError
from octavo.interface.structured_output import StructuredOutputsParams, to_grammar

WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "days": {"type": "integer"},
            "city": {"enum": ["Paris", "Zürich", 'the "Hague"']},
            "sure": {"type": ["boolean", "null"]},
            "hours": {"type": "array", "items": {"type": "number"}},
        },
        "required": ["city"],
    },
}
NOW = {"name": "now"}
ANSWER = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
TOKENIZER = LLTokenizer("byte")
CALLS = [("get_weather", {"city": "Paris"}), ("now", {})]
LISTED = json.dumps([{"name": name, "arguments": arguments} for name, arguments in CALLS])
# How each format writes CALLS.
WRITTEN = {
    "hermes": "".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        for name, arguments in CALLS
    ),
    "llama3_json": "; ".join(f'{{"name": "{name}", "parameters": {json.dumps(args)}}}' for name, args in CALLS),
    "mistral": "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": arguments} for name, arguments in CALLS]),
    "mistral v11": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}',
    "pythonic": '[get_weather(city="Paris"), now()]',
    "qwen3_xml": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n"
    "</seed:tool_call><seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "glm45": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
    "<tool_call>now</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
    '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Paris"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    'get_weather\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>'
    "now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "cohere_command3": '<|START_ACTION|>[{"tool_name": "get_weather", "parameters": {"city": "Paris"}}, '
    '{"tool_name": "now", "parameters": {}}]<|END_ACTION|>',
    "granite": f"<|tool_call|>{LISTED}",
    "hunyuan_a13b": f"<tool_calls>{LISTED}</tool_calls>",
    "nemotron_nano_v2": f"<TOOLCALL>{LISTED}</TOOLCALL>",
    "lfm2": '<|tool_call_start|>[get_weather(city="Paris"), now()]<|tool_call_end|>',
    "olmo3": '<function_calls>\nget_weather(city="Paris")\nnow()\n</function_calls>',
}
WRITTEN |= {row.name: write_calls(row, CALLS) for row in ROWS if row.name not in WRITTEN and row.name != "openai"}


def no_token(text: str) -> int | None:
    return None


def grammar(kind: str, max_calls: int | None = None, functions: list[dict] | None = None) -> str:
    """The answer's form or calls. Markers are text here, for the byte tokenizer has no tokens for them."""
    row = TOOL_FORMATS[kind.partition(" ")[0]]
    if kind == "mistral v11":
        row = replace(row, header="{name}[ARGS]", arguments=Named())
    calls = call_grammar(row, [WEATHER, NOW] if functions is None else functions, max_calls, no_token)
    return or_calls(to_grammar(StructuredOutputsParams(json=ANSWER)), calls, no_token)


def accepts(text: str, *of: object) -> bool:
    matcher = LLMatcher(TOKENIZER, grammar(*of))
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


def parse(kind: str, text: str) -> tuple[list[tuple[str, dict]], str]:
    """The calls and the content."""
    parser = reader_of(TOOL_FORMATS[kind.partition(" ")[0]], {"get_weather": WEATHER["parameters"], "now": {}})
    return added_up([*parser.feed(text), *parser.finish()])


def added_up(pieces: list[Piece]) -> tuple[list[tuple[str, dict]], str]:
    """The calls and the content of pieces."""
    calls: list[list[str]] = []
    content = ""
    for piece in pieces:
        if not isinstance(piece, CallPiece):
            content += piece
        elif piece.name is not None:
            calls.append([piece.name, piece.arguments])
        else:
            calls[-1][1] += piece.arguments
    return [(name, json.loads(arguments)) for name, arguments in calls], content


@pytest.mark.parametrize("kind", WRITTEN)
def test_calls_and_answers_pass_and_nothing_else(kind):
    assert parse(kind, WRITTEN[kind]) == (CALLS, "")
    assert accepts(WRITTEN[kind], kind)
    assert accepts('{"a": true}', kind)
    assert not accepts('{"a": 1}', kind)
    assert not accepts("Hello", kind)
    assert not accepts(WRITTEN[kind].replace("now", "never"), kind)
    assert not accepts(WRITTEN[kind].replace("Paris", "London"), kind)


@pytest.mark.parametrize("kind", WRITTEN)
def test_one_call_when_more_are_not_wanted(kind):
    assert not accepts(WRITTEN[kind], kind, 1)


@pytest.mark.parametrize("kind", WRITTEN)
def test_texts_of_the_grammar_are_calls_that_keep_to_the_schemas(kind):
    rng = random.Random(kind)
    finished = 0
    for _ in range(40):
        text = random_text(LLMatcher(TOKENIZER, grammar(kind)), rng)
        if text is None:
            continue
        finished += 1
        calls, content = parse(kind, text)
        if not calls:
            assert json.loads(content).keys() == {"a"}, text
        for name, arguments in calls:
            if "Infinity" in json.dumps(arguments):
                continue  # as JSON's grammar allows: 1e999
            schema = {"get_weather": WEATHER["parameters"], "now": {"type": "object", "maxProperties": 0}}[name]
            jsonschema_rs.validate(schema, arguments)
        assert not (calls and content.strip()), text
    assert finished > 10


def random_text(matcher: LLMatcher, rng: random.Random) -> str | None:
    """A random walk through the grammar; None when it did not end in time, or not in valid UTF-8."""
    walked = bytearray()
    while len(walked) < 600:
        if matcher.is_accepting() and (matcher.is_stopped() or rng.random() < 0.5):
            try:
                return walked.decode()
            except UnicodeDecodeError:
                return None
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(256) if mask[i // 8] >> (i % 8) & 1]
        if not allowed:
            return None
        closing = [i for i in allowed if i in b'"]})']  # or texts and lists would hardly end
        byte = rng.choice(closing if closing and rng.random() < 0.5 else allowed)
        assert matcher.consume_token(byte)
        walked.append(byte)
    return None


def demanded(kind: str, *functions: dict, choice: object = "required", **fields: object) -> tuple[ToolPlan, str]:
    """How calls are demanded of a model of a format, and their grammar."""
    tools = [{"type": "function", "function": function} for function in functions]
    conversation = Conversation([], tools, tool_choice=choice, **fields)
    plan = plan_tools(conversation, ChatOptions(tool_call_parser=kind), "{{ tools }}")
    assert plan is not None
    constraint = combine_constraints(None, plan, no_token)
    made = Rendered([], ChatOptions(), plan=plan, constraint=constraint, token_id=no_token).grammar()
    assert made is not None
    return plan, made


@pytest.mark.parametrize("kind", [row.name for row in ROWS if row.name != "openai"])
def test_demanded_calls_are_made_and_read_in_the_models_own_format(kind):
    plan, made = demanded(kind, WEATHER, NOW)
    rng, finished = random.Random(kind), 0
    for _ in range(25):
        text = random_text(LLMatcher(TOKENIZER, made), rng)
        if text is None:
            continue
        finished += 1
        reader = plan.new_parser()
        calls, content = added_up([*reader.feed(text), *reader.finish()])
        assert calls and not content.strip(), text
        for name, arguments in calls:
            if "Infinity" not in json.dumps(arguments):
                jsonschema_rs.validate(
                    {"get_weather": WEATHER["parameters"], "now": {"maxProperties": 0}}[name], arguments
                )
    assert finished > 5
    own = plan.forced is None
    assert own is not bool(TOOL_FORMATS[kind].begun)
    if own:
        matcher = LLMatcher(TOKENIZER, made)
        text = WRITTEN[kind]
        assert all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


def check_written_again(kind: str, walks: int, seed: int) -> int:
    """Demanded calls are the ones that the family's templates write of them, so that they are the same tokens when they
    come back as history; but for line breaks between marks, in which templates of a family differ. How many are."""
    plan, made = demanded(kind, WEATHER, NOW)
    rng, equal = random.Random(f"{kind} {seed}"), 0
    for _ in range(walks if plan.forced is None else 0):
        text = random_text(LLMatcher(TOKENIZER, made), rng)
        if text is None or "\\" in text or re.search(r"-0|\d[eE.]", text):
            continue  # of texts and numbers, JSON has several spellings
        if "null" in text and getattr(TOOL_FORMATS[kind].arguments, "kind_end", ""):
            continue  # a schema allows null and another kind, which is the one that is told
        reader = plan.new_parser()
        calls, _ = added_up([*reader.feed(text), *reader.finish()])
        written = write_calls(TOOL_FORMATS[kind], calls)
        assert plain(text) == plain(written)
        equal += 1
    return equal


def plain(text: str) -> str:
    """Without line breaks, the space in front of a recipient, numbers of calls and made-up ids."""
    text = re.sub(r"(functions\.\w+:|index=\")\d+", r"\1", text)
    text = re.sub(r"(\|tool_call:begin\|>)[^<]*", r"\1", text)
    return text.replace("\n", "").replace(" to=", "to=")


JSON_WRITTEN = [
    row.name for row in ROWS if isinstance(row.arguments, Json | JsonKey | Named | Params) and row.name != "mistral"
]


@pytest.mark.parametrize("kind", JSON_WRITTEN)
def test_demanded_calls_are_what_a_template_writes_of_them(kind):
    assert check_written_again(kind, 25, 0) > 2 or TOOL_FORMATS[kind].begun


@pytest.mark.long
@pytest.mark.parametrize("kind", JSON_WRITTEN)
def test_two_hundred_demanded_calls_are_what_a_template_writes_of_them(kind):
    assert check_written_again(kind, 500, 1) >= 200 or TOOL_FORMATS[kind].begun


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "string", "pattern": "b+"}}},
        {"properties": {"a": {"type": ["string", "integer"], "minimum": 3}}},  # a text "2" would be a number
        {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "integer", "multipleOf": 5}]}}},
        {
            "properties": {"a": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/b"}]}},
            "$defs": {"b": {"type": "integer"}},
        },
        {"properties": {"a": {"enum": ["2", 2]}}},
        {"properties": {"a": {}}},
        {"properties": {"a>": {"type": "string"}}, "required": ["a>"]},
        {"properties": {"a": {"type": "integer"}}, "minProperties": 1},
    ],
    ids=str,
)
def test_schemas_that_bare_texts_cannot_keep_are_demanded_as_json(parameters):
    function = {"name": "f", "parameters": {"type": "object", **parameters}}
    plan, _ = demanded("qwen3_xml", function, choice={"type": "function", "function": {"name": "f"}})
    assert plan.forced is NamedCallParser
    assert demanded("hermes", function)[0].forced is None


def test_a_text_of_no_characters_beside_a_list_is_empty():
    either = {"anyOf": [{"type": "string", "maxLength": 0}, {"type": "array"}]}
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": either}, "required": ["a"]}}
    for value, valid in (("", True), ("[]", True), ("x", False)):
        text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
        assert accepts(text, "qwen3_xml", None, [function]) is valid, value


def test_one_demanded_call_ends_the_answer():
    _, made = demanded("glm45", NOW, parallel_tool_calls=False)
    matcher = LLMatcher(TOKENIZER, made)
    assert all(matcher.consume_token(byte) for byte in b"<tool_call>now</tool_call>")
    assert matcher.is_accepting() and not matcher.consume_token(ord("<"))


@pytest.mark.parametrize("parser", ["qwen3_xml", "glm45", "minimax_m2", "gemma4"])
def test_required_arguments_whose_names_cannot_be_written_are_refused(parser):
    named = {"type": "object", "properties": {"a>": {"type": "string"}}}
    needs = {"name": "f", "parameters": named | {"required": ["a>"]}}
    with pytest.raises(FieldError, match=r"arguments with names of letters .*'a>'"):
        grammar(parser, None, [needs])
    assert "a>" not in grammar(parser, None, [{"name": "f", "parameters": named}])


def test_tools_that_python_cannot_call_are_refused():
    with pytest.raises(FieldError, match="rename"):
        grammar("pythonic", None, [{"name": "get-weather"}])
    needs = {"name": "f", "parameters": {"type": "object", "properties": {"a-b": {}}, "required": ["a-b"]}}
    with pytest.raises(FieldError, match="rename"):
        grammar("pythonic", None, [needs])
    assert "get-weather" not in grammar("pythonic", None, [{"name": "get-weather"}, NOW])
