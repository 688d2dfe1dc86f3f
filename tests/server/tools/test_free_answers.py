"""Where the model is free to call, an answer is free but for its calls: those of strict tools keep to their schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer
from support.reciting import small_tokenizer

from octavo.chat.messages import Conversation
from octavo.chat.options import ChatOptions
from octavo.chat.render import Rendered
from octavo.chat.structured import MARKS
from octavo.chat.tools.formats.row import Format
from octavo.chat.tools.formats.table import ROWS, TOOL_FORMATS
from octavo.chat.tools.formats.writer import write_calls
from octavo.chat.tools.parsers import CallPiece
from octavo.chat.tools.plan import ToolPlan, combine_constraints, plan_tools

STRICT = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Bonn"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"type": "string"},
        "hours": {"type": "array", "items": {"type": "boolean"}},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
LOOSE = {"type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}}}
RIGHT, OTHER = {"city": "Paris", "days": 3}, {"text": "a b", "count": 3}
TEXTS = ("", "a < b, [1], {x} > <b>bold</b> functions and Actions\n")
# Their calls have no mark of their own, or share it with other text.
UNHELD = {"llama3_json", "pythonic", "xlam", "functionary_v3_2", "muse_glimmer", "kimi_k3", "openai"}
UNHELD |= {"phi4_mini_json", "cohere_command_r"}  # a word is their mark
TOKENS = {"mistral", "deepseek_v3", "minimax_m3", "gigachat3", "internlm"}  # marks that are tokens wherever they are
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")
HELD = [row for row in ROWS if row.name not in UNHELD]
CASES = [
    pytest.param(row, tokens, id=f"{row.name}-{'tokens' if tokens else 'texts'}")
    for row in HELD
    for tokens in (True, False)
    if tokens or row.name not in TOKENS
]


class Written:
    """A vocabulary, in which a row's marks are tokens of their own or none is."""

    def __init__(self, row: Format, tokens: bool) -> None:
        said = [*TEXTS, json.dumps([RIGHT, OTHER, STRICT, LOOSE])]
        said += [written(row, "weather", RIGHT), written(row, "look", OTHER)] if row in HELD else []
        own = row.arguments
        more = [str(getattr(own, name)) for name in getattr(own, "__dataclass_fields__", ())]
        literals = [*row.section, row.call, row.call_end, row.header, *row.also, *more]
        literals += HARMONY if row.name == "openai" else ()
        found = {mark for text in literals for mark in MARKS.findall(text) if tokens}
        said = [text.replace(mark, " ") for mark in ("", *found) for text in said if mark] if found else said
        is_special = row.special and "DSML" not in row.call
        special, marks = (sorted(found), ()) if is_special else ((), sorted(found))
        backend = small_tokenizer(said, ("<|im_start|>", "<|im_end|>", *special), marks)
        self.backend, self.token_id = backend, backend.token_to_id if tokens else lambda _: None
        self.size, self.end = backend.get_vocab_size(True), backend.token_to_id("<|im_end|>")
        self.read = LLTokenizer(backend.to_str(), n_vocab=self.size, eos_token=[self.end])

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return found

    def accepts(self, grammar: str, text: str) -> bool:
        matcher = LLMatcher(self.read, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return all(matcher.consume_token(token) for token in self.ids(text)) and matcher.is_accepting()


def written(row: Format, name: str, arguments: dict[str, Any]) -> str:
    return write_calls(row, [(name, arguments)])


def planned(
    row: Format, vocabulary: Written, level: str = "auto", parallel: bool = True, **fields: Any
) -> tuple[ToolPlan, str | None]:
    functions: list[dict[str, Any]] = [
        {"name": "weather", "parameters": STRICT, "strict": True},
        {"name": "look", "parameters": LOOSE},
    ]
    tools = [{"type": "function", "function": {**function, **fields}} for function in functions]
    options = ChatOptions(tool_call_parser=row.name, tool_strict_level=level)
    plan = plan_tools(Conversation([], tools, parallel_tool_calls=parallel), options, "{{ tools }}")
    assert plan is not None and combine_constraints(None, plan, vocabulary.token_id) is None
    return plan, Rendered([], options, plan=plan, token_id=vocabulary.token_id).grammar()


def calls_in(plan: ToolPlan, text: str) -> list[tuple[str, dict[str, Any]]]:
    reader, calls = plan.new_parser(), list[list[str]]()
    for piece in [*reader.feed(text), *reader.finish()]:
        if isinstance(piece, CallPiece) and piece.name is not None:
            calls.append([piece.name, piece.arguments])
        elif isinstance(piece, CallPiece):
            calls[-1][1] += piece.arguments
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(("row", "tokens"), CASES)
def test_an_answer_is_free_but_for_the_calls_of_strict_tools(row: Format, tokens: bool) -> None:
    vocabulary = Written(row, tokens)
    plan, grammar = planned(row, vocabulary)
    assert grammar is not None
    right, loose = written(row, "weather", RIGHT), written(row, "look", OTHER)
    assert calls_in(plan, right) == [("weather", RIGHT)]
    for before in TEXTS:
        assert vocabulary.accepts(grammar, before)
        assert vocabulary.accepts(grammar, before + right), before
        assert vocabulary.accepts(grammar, before + loose + "\n" + right)
        for wrong in (
            {"city": "Rome", "days": 3},
            {"city": "Paris", "days": 0},
            {"city": "Paris"},
            {**RIGHT, "more": 1},
        ):
            assert not vocabulary.accepts(grammar, before + written(row, "weather", wrong)), wrong
        assert not vocabulary.accepts(grammar, before + written(row, "unknown", {}))
    assert vocabulary.accepts(grammar, written(row, "look", {"text": "x", "more": "y"})), "it is not strict"
    _, every = planned(row, vocabulary, "parameter")
    assert every is not None and not vocabulary.accepts(every, written(row, "look", {"text": "x", "more": "y"}))


@pytest.mark.parametrize(("row", "tokens"), CASES)
def test_calls_that_are_begun_keep_to_their_schemas(row: Format, tokens: bool) -> None:
    vocabulary, finished = Written(row, tokens), 0
    plan, grammar = planned(row, vocabulary, parallel=False)
    begun = written(row, "weather", RIGHT).partition("weather")[0] + "weather"
    rng = random.Random(f"{row.name} {tokens}")
    for _ in range(6):
        text = walk(vocabulary, str(grammar), begun, rng)
        if text is not None:
            finished += 1
            ((name, arguments),) = calls_in(plan, text)
            assert name == "weather"
            jsonschema_rs.validate(STRICT, arguments)
    assert finished > 1


def walk(vocabulary: Written, grammar: str, begun: str, rng: random.Random) -> str | None:
    """A random walk behind the beginning of a call; None if it comes to no end."""
    matcher, ids = LLMatcher(vocabulary.read, grammar, log_level=0), vocabulary.ids(begun)
    assert all(matcher.consume_token(token) for token in ids)
    while len(ids) < 200:
        if matcher.is_accepting():
            return vocabulary.backend.decode(ids, skip_special_tokens=False)
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(vocabulary.size) if mask[i // 8] >> (i % 8) & 1]
        ids.append(_choice(allowed, vocabulary, rng))
        assert matcher.consume_token(ids[-1])
    return None


def _choice(allowed: Sequence[int], vocabulary: Written, rng: random.Random) -> int:
    closing = [i for i in allowed if set(vocabulary.backend.id_to_token(i) or "") & set('"]})>')]
    return rng.choice(closing if closing and rng.random() < 0.6 else allowed)


def test_answers_without_strict_tools_cost_nothing_and_levels_hold_more() -> None:
    row = HELD[0]
    vocabulary = Written(row, True)
    plan, grammar = planned(row, vocabulary, strict=False)
    assert grammar is None and plan.free is None
    _, grammar = planned(row, vocabulary, "function", strict=False)
    assert grammar is not None and vocabulary.accepts(grammar, written(row, "weather", {"x": 1}))
    assert not vocabulary.accepts(grammar, written(row, "unknown", {}))


def test_gpt_oss_calls_in_commentary_and_says_the_rest_freely() -> None:
    row = TOOL_FORMATS["openai"]
    vocabulary = Written(row, True)
    _, grammar = planned(row, vocabulary)
    assert grammar is not None
    thought = "<|channel|>analysis<|message|>Hm. a < b<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
    assert vocabulary.accepts(grammar, thought + "<|channel|>final<|message|>Hello.\n")
    assert vocabulary.accepts(grammar, thought + call.format("weather", json.dumps(RIGHT)))
    assert vocabulary.accepts(grammar, call.format("look", json.dumps({"more": [1]})))
    assert not vocabulary.accepts(grammar, thought + call.format("weather", json.dumps({**RIGHT, "days": 0})))
    assert not vocabulary.accepts(grammar, call.format("unknown", "{}"))


def test_of_a_schema_that_no_grammar_holds_the_rest_is_held() -> None:
    row, parameters = HELD[0], {**STRICT, "not": {"required": ["note"]}}
    vocabulary = Written(row, True)
    _, grammar = planned(row, vocabulary, parameters=parameters, strict=True)
    assert grammar is not None and vocabulary.accepts(grammar, written(row, "weather", RIGHT))
    assert not vocabulary.accepts(grammar, written(row, "weather", {**RIGHT, "days": 0}))


@pytest.mark.parametrize("name", sorted(UNHELD - {"openai"}))
def test_nothing_is_held_of_calls_without_a_mark_of_their_own(name: str) -> None:
    row = TOOL_FORMATS[name]
    assert planned(row, Written(row, True))[1] is None
