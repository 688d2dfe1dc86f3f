"""A demanded call that comes back as history is, in the template's rendering, what was said: the same tokens again."""

from __future__ import annotations

import random
import re

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from octavo.chat.messages import Conversation, check_messages
from octavo.chat.options import ChatOptions
from octavo.chat.render import Rendered, render
from octavo.chat.tools.choice import format_of
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
        },
        "required": ["place"],
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
    "minimax m3": "{% macro tree(v) %}{% if v is mapping %}{% for k, i in v.items() %}]<]minimax[>[<{{ k }}>"
    "{{ tree(i) }}]<]minimax[>[</{{ k }}>{% endfor %}{% elif v is string %}{{ v }}{% elif v is sequence %}"
    "{% for i in v %}]<]minimax[>[<item>{{ tree(i) }}]<]minimax[>[</item>{% endfor %}{% else %}{{ v | tojson }}"
    "{% endif %}{% endmacro %}{% if m.tool_calls %}"
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
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", '<|"|>', "]<]minimax[>["]
THOUGHT = "So I look."


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
    planned = tokenizer.encode(thoughts)
    while len(ids) < 600:
        if matcher.is_accepting() and (matcher.is_stopped() or rng.random() < 0.4):
            return tokenizer.decode(ids, skip_special_tokens=False)
        mask = matcher.compute_bitmask()
        allowed = [one for one in range(backend.get_vocab_size()) if mask[one // 8] >> (one % 8) & 1 and one != end]
        if not allowed:
            return None
        told = [one for one in allowed if one > 255 or tokenizer.decode([one]) in '"]}\n<']
        if planned and planned[0] in allowed:
            chosen = planned.pop(0)
        else:
            chosen = rng.choice(told or allowed)
        assert matcher.consume_token(chosen), matcher.get_error()
        ids.append(chosen)
    return None


def said_again(template: str, walks: int, seed: int, marks: bool = False) -> int:
    """How many demanded calls were rendered as they were said; fails where one was not."""
    assert format_of(template).row.gaps is not None
    tokenizer = bytewise(template, marks)
    tools = [{"type": "function", "function": function} for function in (LOOK, NOW)]
    chat = [{"role": "user", "content": "?"}]

    def text_of(messages: list[dict], choice: object, opens: bool) -> Rendered:
        asked = Conversation(check_messages(messages), tools, choice, add_generation_prompt=opens)
        return render(asked, ChatOptions(), tokenizer, lambda text: tokenizer.encode(text), lambda: "")

    asked = text_of(chat, "required", True)
    closing = asked.frame.thoughts[1] if asked.frame is not None and asked.frame.thoughts else ""
    thoughts = THOUGHT + closing[: closing.find("</think>") + len("</think>")] if closing else ""
    rng, equal = random.Random(seed), 0
    for _ in range(walks):
        said = walked(tokenizer, str(asked.grammar()), rng, thoughts)
        if said is None or "\ufffd" in said:
            continue
        answer = asked.new_parser().parse(CompletionOutput(0, said, tokenizer.encode(said), finish_reason="stop"))
        assert answer.calls and not answer.content.strip(), said
        if any(re.search(r"-0|\d[eE.]", call.arguments) for call in answer.calls):  # numbers of several spellings
            continue
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
        turn = {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": answer.reasoning}
        again = str(text_of([*chat, turn], None, False).text)
        assert again == f"{asked.text}{said}<|end|>"
        equal += 1
    return equal


@pytest.mark.parametrize("name", TEMPLATES)
def test_demanded_calls_are_rendered_as_they_were_said(name: str) -> None:
    assert said_again(made_template(name, "", ""), 25, 0, marks=name in ("gemma", "minimax m3")) >= 5


@pytest.mark.sampled
@pytest.mark.parametrize("marks", [False, True], ids=["texts", "tokens"])
@pytest.mark.parametrize("thoughts", THOUGHTS)
@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_demanded_calls_are_rendered_as_said_behind_any_lead(name: str, lead: str, thoughts: str, marks: bool) -> None:
    assert said_again(made_template(name, lead, thoughts), 8, 1, marks) >= 1


@pytest.mark.long
@pytest.mark.parametrize("name", TEMPLATES)
def test_two_hundred_demanded_calls_are_rendered_as_they_were_said(name: str) -> None:
    assert said_again(made_template(name, "", "opened thoughts"), 600, 1, marks=True) >= 200
