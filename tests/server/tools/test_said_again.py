"""A demanded call that comes back as history is, in the template's rendering, what was said: the same tokens again."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from octavo.chat.answer import AnswerDelta
from octavo.chat.messages import Conversation, check_messages
from octavo.chat.options import ChatOptions
from octavo.chat.render import Rendered, render
from octavo.chat.tools.choice import format_of
from octavo.chat.tools.formats.row import Elements, Python, Typed
from octavo.chat.tools.scalars import parameters_of
from octavo.interface.outputs import CompletionOutput
from octavo.text.tokenizer import Tokenizer

LOOK = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {
            "place": {"enum": ["Paris", "Zürich", 'the "Hague"']},
            "count": {"type": "integer"},
            "names": {"type": "array", "items": {"enum": ["a", "b"]}},
            "deep": {"type": "boolean"},
            "note": {"type": "string"},
            "ratio": {"type": "number"},
        },
        "required": ["place"],
    },
}
INNER = {"text": {"type": "string"}, "lines": {"type": "array", "items": {"type": "string"}}, "gap": {"type": "null"}}
DEEP = {
    "name": "deep",
    "parameters": {
        "type": "object",
        "properties": {
            "gap": {"type": "null"},
            "inner": {"type": "object", "properties": INNER, "required": ["text"], "additionalProperties": False},
            "items": {"type": "array", "items": {"type": "object", "properties": INNER, "additionalProperties": False}},
        },
        "required": ["inner"],
    },
}
NOW = {"name": "now"}
HEAD = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
TAIL = "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
EACH = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
ITEMS = "{% for k, v in f.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
BODY = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
TEMPLATES = {
    "hermes": EACH + "{{ '\n' if not loop.first }}<tool_call>\n" + BODY + "\n</tool_call>{% endfor %}",
    "hermes in a line": EACH + "<tool_call>" + BODY + "</tool_call>{% endfor %}",
    "listed": "{% if m.tool_calls %}<tool_calls>[" + EACH + BODY + "{{ ', ' if not loop.last }}{% endfor %}]"
    "</tool_calls>{% endif %}",
    "qwen3_xml": EACH + "{{ '\n' if not loop.first }}<tool_call>\n<function={{ f.name }}>\n" + ITEMS
    + "<parameter={{ k }}>\n" + VALUE + "\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
    "nemotron": EACH + "{{ '\n' if not loop.first }}<tool_call>\n<function={{ f.name }}>\n" + ITEMS
    + "<parameter={{ k }}>\n{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
    "mimo": EACH + "<tool_call><function={{ f.name }}>" + ITEMS + "<parameter={{ k }}>" + VALUE + "</parameter>"
    "{% endfor %}</function></tool_call>{% endfor %}",
    "glm 4.6": EACH + "\n<tool_call>{{ f.name }}\n" + ITEMS + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + VALUE
    + "</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
    "glm 4.7": EACH + "<tool_call>{{ f.name }}" + ITEMS + "<arg_key>{{ k }}</arg_key><arg_value>" + VALUE
    + "</arg_value>{% endfor %}</tool_call>{% endfor %}",
    "minimax": "{% if m.tool_calls %}<minimax:tool_call>\n" + EACH + '<invoke name="{{ f.name }}">\n' + ITEMS
    + '<parameter name="{{ k }}">' + VALUE + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>"
    "{% endif %}",
}  # fmt: skip
TEMPLATES |= {
    "ling": EACH + "{{ '\n' if not loop.first }}<tool_call>{{ f.name }}\n" + ITEMS + "<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>" + VALUE + "</arg_value>{% endfor %}\n</tool_call>{% endfor %}",
    "one object a line": "{% if m.tool_calls %}<tool_calls>\n" + EACH + BODY + "\n{% endfor %}</tool_calls>{% endif %}",
    "command": "{% if m.tool_calls %}<|START_ACTION|>[" + EACH + '{{ "," if not loop.first }}\n    {"tool_call_id": '
    '"{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}\n]'
    "<|END_ACTION|>{% endif %}",
    "kimi": "{% if m.tool_calls %}<|tool_calls_section_begin|>" + EACH + "<|tool_call_begin|>functions.{{ f.name }}:"
    "{{ loop.index0 }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}",
    "mistral 3.2": EACH + "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}{% endfor %}",
    "mistral nemo": "{% if m.tool_calls %}[TOOL_CALLS][" + EACH + BODY.replace("}}}", "}}, \"id\": \"{{ c.id }}\"}")
    + "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}",
    "solar": "{% if m.tool_calls %}<|tool_calls|>" + EACH + "<|tool_call:begin|>{{ c.id }}<|tool_call:name|>"
    "{{ f.name }}<|tool_call:args|>{{ f.arguments | tojson }}<|tool_call:end|>{% endfor %}<|calls|>{% endif %}",
    "llama": "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one at a time') }}"
    "{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% endif %}",
    "gemma": '{% macro typed(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}{{ "{" }}'
    "{% for k, i in v | dictsort %}{{ k }}:{{ typed(i) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
    "{% elif v is sequence %}[{% for i in v %}{{ typed(i) }}{{ ',' if not loop.last }}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}" + EACH
    + "<|tool_call>call:{{ f.name }}{{ typed(f.arguments) }}<tool_call|>{% endfor %}",
    "lfm2": "{% if m.tool_calls %}<|tool_call_start|>[" + EACH + "{{ f.name }}(" + ITEMS + "{{ k }}={{ v | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]<|tool_call_end|>{% endif %}",
    "minicpm5": EACH + "{{ '\n' if not loop.first }}<function name=\"{{ f.name }}\">" + ITEMS + '<param name="{{ k }}">'
    "{% if v is string %}{{ '<![CDATA[' ~ v ~ ']]>' if '<' in v or '&' in v or '\n' in v else v }}{% else %}"
    "{{ v | tojson }}{% endif %}</param>{% endfor %}</function>{% endfor %}",
    "lfm2 in Python": "{% if m.tool_calls %}<|tool_call_start|>[" + EACH + "{{ f.name }}(" + ITEMS
    + "{{ k }}={{ ([v] | string)[1:-1] }}{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}"
    "{% endfor %}]<|tool_call_end|>{% endif %}",
    "minimax m3": "{% macro tree(v) %}{% if v is mapping %}{% for k, i in v.items() if i is not none %}"
    "]<]minimax[>[<{{ k }}>{{ tree(i) }}]<]minimax[>[</{{ k }}>{% endfor %}{% elif v is string %}{{ v }}"
    "{% elif v is sequence %}{% for i in v %}]<]minimax[>[<item>{{ tree(i) }}]<]minimax[>[</item>{% endfor %}"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}{% if m.tool_calls %}"
    "]<]minimax[>[<tool_call>\n" + EACH + ']<]minimax[>[<invoke name="{{ f.name }}">'
    "{{ tree(f.arguments) }}]<]minimax[>[</invoke>\n{% endfor %}]<]minimax[>[</tool_call>{% endif %}",
}  # fmt: skip
# What a template writes in front of a turn's calls, and around its thoughts.
LEADS = {"": "", "a line break": "\n", "two line breaks": "\n\n"}
THOUGHTS = {
    "": ("", ""),
    "thoughts": ("", "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"),
    "opened thoughts": ("<think>\n", "<think>\n{{ m.reasoning_content }}\n</think>\n\n"),
    "thoughts in a line": ("<think>", "<think>{{ m.reasoning_content }}</think>"),
}
HARMONYS = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"]
MARKS = [
    *HARMONYS,
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    '<|"|>',
    "]<]minimax[>[",
]
THOUGHT = "So I look."
# Pieces of free texts.
SAID = ('say "no"', "two\nlines", " <b>x</b>", "it's", "C:\\dir", "{a: [1]}", "é日", "null", "007", "</tool>", "\t")


def made_template(name: str, lead: str, thoughts: str) -> str:
    opening, spoken = THOUGHTS[thoughts]
    head = HEAD.replace("{{ m.content }}", "{% if m.role == 'assistant' %}" + spoken + "{% endif %}{{ m.content }}")
    head += "{% if m.tool_calls %}" + LEADS[lead].replace("\n", "{{ '\\n' }}") + "{% endif %}"
    return head + TEMPLATES[name] + TAIL.replace("<|assistant|>", "<|assistant|>" + opening)


def bytewise(template: str, marks: bool) -> Tokenizer:
    """A tokenizer of bytes, with marks that are tokens or without."""
    letters = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in ["<|end|>", *(MARKS if marks else ())]])
    return Tokenizer(backend, {"eos_token": "<|end|>"}, {"default": template})


def walked(tokenizer: Tokenizer, grammar: str, rng: random.Random, thoughts: str) -> str | None:
    """A random text of a grammar; None where it does not end soon. Thoughts, if any, are always the same."""
    backend = tokenizer.backend
    end = backend.token_to_id("<|end|>")
    reader = LLTokenizer(backend.to_str(), n_vocab=backend.get_vocab_size(), eos_token=[end])
    matcher, ids = LLMatcher(reader, grammar), list[int]()
    ends = {*tokenizer.encode('"]}\n<')}
    planned, said = tokenizer.encode(thoughts), list[int]()
    while len(ids) < 600:
        if matcher.is_accepting() and not planned and (matcher.is_stopped() or rng.random() < 0.4):
            return tokenizer.decode(ids, skip_special_tokens=False)
        mask = matcher.compute_bitmask()
        allowed = [one for one in range(backend.get_vocab_size()) if mask[one // 8] >> (one % 8) & 1 and one != end]
        if not allowed:
            return None
        told = [one for one in allowed if one > 255 or one in ends]
        if planned and planned[0] in allowed:
            chosen = planned.pop(0)
        elif said and said[0] in allowed:
            chosen = said.pop(0)
        elif len(allowed) > 100 and not said and rng.random() < 0.5:  # inside of a free text
            said = tokenizer.encode(rng.choice(SAID))
            chosen = said.pop(0) if said[0] in allowed else rng.choice(told or allowed)
        else:
            said = []
            chosen = rng.choice(told or allowed)
        assert matcher.consume_token(chosen), matcher.get_error()
        ids.append(chosen)
    return None


@dataclass(frozen=True)
class Mode:
    """A request's demands on calls."""

    choice: Any = "required"
    parallel: bool | None = None
    strict: bool = False

    def demanded(self, template: str, functions: Sequence[dict[str, Any]], marks: bool, messages: list, opens: bool):
        """The messages, rendered for an answer with calls, and a tokenizer."""
        tokenizer = bytewise(template, marks)
        tools = [{"type": "function", "function": {**one, "strict": True} if self.strict else one} for one in functions]
        choice = self.choice if opens else None
        asked = Conversation(
            check_messages(messages), tools, choice, parallel_tool_calls=self.parallel, add_generation_prompt=opens
        )
        return render(asked, ChatOptions(), tokenizer, lambda text: tokenizer.encode(text), lambda: ""), tokenizer


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


MODES = {"required": Mode(), "named": Mode(named("look")), "one": Mode(parallel=False)}
CHAT = [{"role": "user", "content": "?"}]
Drawn = tuple[Rendered, str, AnswerDelta]


def drawn(
    template: str, functions: Sequence[dict[str, Any]], mode: Mode, walks: int, seed: int, marks: bool, begins: str = ""
) -> Iterator[Drawn]:
    """Answers of a grammar: the prompt, what was said, and what was read, which keeps to the schemas. ``begins``: what
    the answer begins with, as far as the grammar lets it."""
    asked, tokenizer = mode.demanded(template, functions, marks, CHAT, True)
    closing = asked.frame.thoughts[1] if asked.frame is not None and asked.frame.thoughts else ""
    thoughts = THOUGHT + closing[: closing.find("</think>") + len("</think>")] if closing else begins
    valid = {one["name"]: jsonschema_rs.validator_for(parameters_of(one)) for one in functions}
    rng, grammar = random.Random(seed), asked.grammar()
    assert grammar is not None
    for _ in range(walks):
        said = walked(tokenizer, grammar, rng, thoughts)
        if said is None or "\ufffd" in said:
            continue
        answer = asked.new_parser().parse(CompletionOutput(0, said, tokenizer.encode(said), finish_reason="stop"))
        for call in answer.calls:
            assert valid[call.name].is_valid(json.loads(call.arguments)), (said, call.arguments)
        if mode.choice != "auto":
            assert answer.calls and not answer.content.strip(), said
        if isinstance(mode.choice, dict):
            assert [call.name for call in answer.calls] == [mode.choice["function"]["name"]]
        assert mode.parallel is None or len(answer.calls) <= 1
        yield asked, said, answer


def again(template: str, functions: Sequence[dict[str, Any]], mode: Mode, marks: bool, answer: AnswerDelta) -> str:
    """The prompt and an answer that came back as history."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.calls
    ]
    turn = {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": answer.reasoning}
    return str(mode.demanded(template, functions, marks, [*CHAT, turn], False)[0].text)


def has_other_spellings(answer: AnswerDelta) -> bool:
    """True if an answer has numbers that JSON spells in several ways: templates write the one that Python does."""
    return any(re.search(r"-0(?![.\d])|\d[eE]|\.\d*0\b|\d{15}", call.arguments) for call in answer.calls)


def said_again(template: str, walks: int, seed: int, marks: bool = False, mode: Mode = MODES["required"]) -> int:
    """How many demanded calls were rendered as they were said; fails where one was not."""
    row = format_of(template).row
    assert row.gaps is not None
    equal = 0
    for functions in (LOOK, NOW), (DEEP, NOW):
        if isinstance(mode.choice, dict):
            mode = Mode(named(functions[0]["name"]))
        for asked, said, answer in drawn(template, functions, mode, walks, seed, marks):
            if has_other_spellings(answer) and not isinstance(row.arguments, Typed | Python | Elements):
                continue
            assert again(template, functions, mode, marks, answer) == f"{asked.text}{said}<|end|>"
            equal += 1
    return equal


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_demanded_calls_are_rendered_as_they_were_said(name: str, mode: str) -> None:
    assert said_again(made_template(name, "", ""), 7, 0, name in ("gemma", "minimax m3"), MODES[mode]) >= 3


@pytest.mark.sampled
@pytest.mark.parametrize("marks", [False, True], ids=["texts", "tokens"])
@pytest.mark.parametrize("thoughts", THOUGHTS)
@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_demanded_calls_are_rendered_as_said_behind_any_lead(name: str, lead: str, thoughts: str, marks: bool) -> None:
    assert said_again(made_template(name, lead, thoughts), 8, 1, marks) >= 1


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_two_hundred_demanded_calls_are_rendered_as_they_were_said(name: str, mode: str) -> None:
    assert said_again(made_template(name, "", "opened thoughts"), 400, 1, True, MODES[mode]) >= 200


FREE = Mode(
    "auto", strict=True
)  # calls may have other line breaks than the template's: they are kept as they were said


EITHER = {
    "name": "either",
    "parameters": {
        "type": "object",
        "properties": {
            "sure": {"type": "boolean"},
            "note": {"type": ["string", "null"]},
            "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "names": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
            "level": {"enum": ["low", "null and void", None]},
            "box": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "on": {"type": "boolean"}},
                "required": ["text"],
                "additionalProperties": False,
            },
        },
        "required": ["sure"],
    },
}
# Templates that print lists and objects as Python does, and one that prints null as None.
AS_PYTHON = {
    "seed": TEMPLATES["qwen3_xml"].replace("v | tojson", "v | string"),
    "minicpm5": TEMPLATES["minicpm5"].replace("v | tojson", "v | string"),
    "gemma": TEMPLATES["gemma"].replace("{{ v | tojson }}", "{{ 'None' if v is none else v | tojson }}"),
}


@pytest.mark.parametrize("name", ["qwen3_xml", "glm 4.7", "minimax", "minicpm5", "lfm2 in Python", "gemma", "hermes"])
def test_calls_with_values_of_several_kinds_are_in_the_model_s_own_format(name: str) -> None:
    template, found = made_template(name, "", ""), 0
    mode = Mode(named("either"))
    for asked, said, answer in drawn(template, [EITHER], mode, 40, 6, name == "gemma"):
        assert asked.plan is not None and asked.plan.forced is None
        if not has_other_spellings(answer):
            assert again(template, [EITHER], mode, name == "gemma", answer) == f"{asked.text}{said}<|end|>"
            found += 1
    assert found >= 3


@pytest.mark.parametrize("name", AS_PYTHON)
def test_objects_are_said_as_a_template_prints_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TEMPLATES, name, AS_PYTHON[name])
    template, texts = made_template(name, "", ""), ""
    for function in DEEP, EITHER:
        mode = Mode(named(function["name"]))
        for asked, said, answer in drawn(template, [function], mode, 8, 7, name == "gemma"):
            assert asked.plan is not None and asked.plan.forced is None
            if not has_other_spellings(answer):
                assert again(template, [function], mode, name == "gemma", answer) == f"{asked.text}{said}<|end|>"
                texts += said
    assert "None" in texts
    assert name == "gemma" or "{'text': " in texts


WORDS = {
    "name": "words",
    "parameters": {
        "type": "object",
        "properties": {
            "sure": {"type": "boolean"},
            "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "either": {"type": ["boolean", "array"], "items": {"type": "integer"}},
        },
        "required": ["sure", "maybe", "either"],
    },
}


def test_words_that_a_template_writes_as_python_does_are_said_so() -> None:
    template, said = made_template("nemotron", "", ""), ""
    mode = Mode(named("words"))
    for asked, text, answer in drawn(template, [WORDS], mode, 20, 4, False):
        assert again(template, [WORDS], mode, False, answer) == f"{asked.text}{text}<|end|>"
        said += text
    assert all(f"\n{word}\n" in said for word in ("True", "False", "None", "[]"))


@pytest.mark.sampled
@pytest.mark.parametrize("parallel", [None, False])
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "llama"])  # whose calls have no mark
def test_calls_of_strict_tools_keep_to_their_schemas_where_the_model_is_free(name: str, parallel: bool | None) -> None:
    template = made_template(name, "", "")
    row = format_of(template).row
    mark = row.around[0] or row.call
    found = list(drawn(template, (LOOK, DEEP, NOW), replace(FREE, parallel=parallel), 12, 2, True, f"Well. {mark}"))
    assert sum(bool(answer.calls) for _, _, answer in found) >= 3


HARMONY = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.tool_calls %}{% if m.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}{% set f = "
    "m.tool_calls[0].function %}<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}<|call|>{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>"
    "{{ m.content }}<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@pytest.mark.parametrize("mode", [*MODES.values(), FREE], ids=[*MODES, "free"])
def test_harmony_s_calls_are_rendered_as_they_were_said_but_for_their_headers(mode: Mode) -> None:
    """The templates write recipients in front of the channel, the model behind it."""
    begins = "<|channel|>commentary to=functions.look <|constrain|>json" if mode is FREE else ""
    equal = 0
    for asked, said, answer in drawn(HARMONY, (LOOK, DEEP, NOW), mode, 12, 3, True, begins):
        if not answer.calls or answer.content or has_other_spellings(answer):
            continue
        own = r"<\|channel\|>commentary to=(\S+) <\|constrain\|>json(<\|message\|>(?:(?!<\|).)*)\Z"
        written = re.sub(own, r" to=\1<|channel|>commentary json\2", said.removesuffix("<|call|>"), flags=re.DOTALL)
        text = again(HARMONY, (LOOK, DEEP, NOW), mode, True, answer)
        equal += text == f"{asked.text}{written}<|call|>"
        assert mode is FREE or text == f"{asked.text}{written}<|call|>"
    assert equal >= 3
