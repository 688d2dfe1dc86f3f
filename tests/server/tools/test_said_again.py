"""A demanded call that comes back as history is, in the template's rendering, what was said: the same tokens again."""

from __future__ import annotations

import json
import random
import re

import pytest
from llguidance import LLMatcher, LLTokenizer

from octavo.chat.messages import Conversation
from octavo.chat.options import ChatOptions
from octavo.chat.render import Rendered
from octavo.chat.tools.choice import format_of
from octavo.chat.tools.parsers import CallPiece
from octavo.chat.tools.plan import combine_constraints, plan_tools
from octavo.text.chat_template import render

LOOK = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {
            "place": {"enum": ["Paris", "Zürich", 'the "Hague"']},
            "count": {"type": "integer"},
            "names": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
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
    "glm 4.6": EACH + "\n<tool_call>{{ f.name }}\n" + ITEMS + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + VALUE
    + "</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
    "glm 4.7": EACH + "<tool_call>{{ f.name }}" + ITEMS + "<arg_key>{{ k }}</arg_key><arg_value>" + VALUE
    + "</arg_value>{% endfor %}</tool_call>{% endfor %}",
    "minimax": "{% if m.tool_calls %}<minimax:tool_call>\n" + EACH + '<invoke name="{{ f.name }}">\n' + ITEMS
    + '<parameter name="{{ k }}">' + VALUE + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>"
    "{% endif %}",
}  # fmt: skip
BYTES = LLTokenizer("byte")


def walked(grammar: str, rng: random.Random) -> str | None:
    """A random text of a grammar; None where it does not end soon."""
    matcher, text = LLMatcher(BYTES, grammar), bytearray()
    while len(text) < 600:
        if matcher.is_accepting() and (matcher.is_stopped() or rng.random() < 0.4):
            return (
                text.decode(errors="ignore") if text.decode(errors="replace") == text.decode(errors="ignore") else None
            )
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte // 8] >> (byte % 8) & 1]
        if not allowed:
            return None
        byte = rng.choice([one for one in allowed if one in b'"]}'] or allowed)
        assert matcher.consume_token(byte)
        text.append(byte)
    return None


def said_again(name: str, walks: int, seed: int) -> int:
    """How many demanded calls were rendered as they were said; fails where one was not."""
    template = HEAD + TEMPLATES[name] + TAIL
    assert format_of(template).row.exact
    tools = [{"type": "function", "function": function} for function in (LOOK, NOW)]
    plan = plan_tools(Conversation([], tools, tool_choice="required"), ChatOptions(), template)
    assert plan is not None
    constraint = combine_constraints(None, plan, lambda _: None)
    grammar = Rendered([], ChatOptions(), plan=plan, constraint=constraint).grammar()
    rng, equal = random.Random(seed), 0
    for _ in range(walks):
        text = walked(str(grammar), rng)
        if text is None or re.search(r"-0|\d[eE.]", text):  # numbers of several spellings
            continue
        reader, calls = plan.new_parser(), list[list[str]]()
        for piece in [*reader.feed(text), *reader.finish()]:
            if isinstance(piece, CallPiece) and piece.name is not None:
                calls.append([piece.name, ""])
            if isinstance(piece, CallPiece):
                calls[-1][1] += piece.arguments
        made = [{"function": {"name": name, "arguments": json.loads(given)}} for name, given in calls]
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": made}]
        written = render(template, chat, add_generation_prompt=False).rpartition("<|assistant|>")[2]
        assert written.strip("\n") == text.strip("\n") + "<|end|>"
        equal += 1
    return equal


@pytest.mark.parametrize("name", TEMPLATES)
def test_demanded_calls_are_rendered_as_they_were_said(name):
    assert said_again(name, 25, 0) >= 5


@pytest.mark.long
@pytest.mark.parametrize("name", TEMPLATES)
def test_two_hundred_demanded_calls_are_rendered_as_they_were_said(name):
    assert said_again(name, 600, 1) >= 200
