"""Messages that name who is to read them: calls of Functionary 3.2 and Muse, whose answers have headers, too."""

from __future__ import annotations

import pytest
from tests.support.reciting import small_tokenizer

from octavo.chat.messages import Conversation, check_messages
from octavo.chat.options import ChatOptions
from octavo.chat.render import render
from octavo.interface.outputs import CompletionOutput
from octavo.text.tokenizer import Tokenizer

FUNCTIONARY = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{% if m.content and m.role == "
    "'assistant' %}>>>all\n{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}>>>{{ c.function.name }}\n"
    "{{ c.function.arguments }}{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>>>>{% endif %}"
)
MUSE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}<|start|>assistant to=self<|message|>{{ m.reasoning_content }}<|eom|>{% endif %}"
    "{% for c in m.tool_calls or [] %}<|start|>assistant to={{ c.function.name }}<|message|><atem:function_calls>\n"
    '<atem:invoke name="{{ c.function.name }}">\n{% for k, v in c.function.arguments.items() %}'
    '<atem:parameter name="{{ k }}">{{ v if v is string else v | tojson }}</atem:parameter>\n{% endfor %}'
    "</atem:invoke>\n</atem:function_calls><|eom|>{% endfor %}{% if not m.tool_calls %}<|start|>assistant "
    "to=user<|message|>{{ m.content }}<|eot|>{% endif %}{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|eot|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
CALL = (
    '<atem:function_calls>\n<atem:invoke name="now">\n<atem:parameter name="zone">Z</atem:parameter>\n</atem:invoke>\n'
    "</atem:function_calls>"
)
ZONE = {"type": "object", "properties": {"zone": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": ZONE}}]
NOW = ("now", '{"zone": "Z"}')


def read(template: str, text: str, tools: bool, size: int) -> tuple[str, str, list[tuple[str, str]]]:
    """Thoughts, content and calls."""
    tokenizer = Tokenizer(small_tokenizer(["now"], ["<|end|>"]), {})
    conversation = Conversation(check_messages([{"role": "user", "content": "Hi"}]), TOOLS if tools else None)
    rendered = render(conversation, ChatOptions(template), tokenizer, tokenizer.encode, str)
    parser = rendered.new_parser()
    thoughts = content = ""
    calls: list[list[str]] = []
    for at in range(0, len(text), size):
        reason = "stop" if at + size >= len(text) else None
        delta = parser.feed(CompletionOutput(0, text[at : at + size], [0], finish_reason=reason))
        thoughts, content = thoughts + delta.reasoning, content + delta.content
        for call in delta.calls:
            if call.name is not None:
                calls.append([call.name, ""])
            calls[-1][1] += call.arguments
    return thoughts, content, [(name, arguments) for name, arguments in calls]


CASES = [
    (FUNCTIONARY, 'now\n{"zone": "Z"}', True, ("", "", [NOW])),
    (FUNCTIONARY, 'now\n{"zone": "Z"}>>>now\n{"zone": "Z"}', True, ("", "", [NOW, NOW])),
    (FUNCTIONARY, 'all\nI look.>>>now\n{"zone": "Z"}', True, ("", "I look.", [NOW])),
    (FUNCTIONARY, "all\nNow or never.", True, ("", "Now or never.", [])),
    (FUNCTIONARY, "all\nNow or never.", False, ("", "Now or never.", [])),
    (FUNCTIONARY, "Now or never >>> that.", True, ("", "Now or never >>> that.", [])),
    (FUNCTIONARY, "now", True, ("", "now", [])),
    (MUSE, f" to=self<|message|>Hm.<|eom|><|start|>assistant to=now<|message|>{CALL}", True, ("Hm.", "", [NOW])),
    (
        MUSE,
        f" to=now<|message|>{CALL}<|eom|><|start|>assistant to=self<|message|>So.<|eom|><|start|>assistant "
        f"to=now<|message|>{CALL}",
        True,
        ("So.", "", [NOW, NOW]),
    ),
    (MUSE, f" to=self<|message|>Never closed. to=now<|message|>{CALL}", True, ("Never closed.", "", [NOW])),
    # A call without a header behind thoughts.
    (
        MUSE,
        f" to=now<|message|>{CALL}<|eom|><|start|>assistant to=self<|message|>So.<|eom|>{CALL}",
        True,
        ("So.", "", [NOW, NOW]),
    ),
    # Calls that a message to somebody else only quotes.
    (MUSE, f" to=user<|message|>As in {CALL}<|eot|>", True, ("", f"As in {CALL}", [])),
    (
        MUSE,
        f" to=self<|message|>Perhaps {CALL}?<|eom|><|start|>assistant to=user<|message|>{CALL} or not.<|eom|><|start|>"
        f"assistant to=now<|message|>{CALL}",
        True,
        (f"Perhaps {CALL}?", f"{CALL} or not.", [NOW]),
    ),
    (
        MUSE,
        f" to=commentary<|message|>First I look.<|eom|><|start|>assistant to=now<|message|>{CALL}",
        True,
        ("", "First I look.", [NOW]),
    ),
    (MUSE, f" to=commentary<|message|>As in {CALL}<|eot|>", True, ("", f"As in {CALL}", [])),
    (MUSE, " to=user<|message|>I write to=user.<|eot|>", True, ("", "I write to=user.", [])),
    (
        MUSE,
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>",
        False,
        ("Hm.", "Yes.", []),
    ),
]


@pytest.mark.parametrize(("template", "text", "tools", "expected"), CASES)
def test_headers_are_no_content_and_tell_calls(template, text, tools, expected):
    for size in (1, 2, 5, 1000):
        assert read(template, text, tools, size) == expected, size
