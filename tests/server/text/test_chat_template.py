"""Conversations become the prompts that transformers makes of them, and templates can do nothing else."""

from __future__ import annotations

from datetime import datetime
from enum import Enum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from octavo.text.chat_template import ChatTemplateError, check_variables, render
from octavo.text.tokenizer import Tokenizer

# Templates of our own in the shapes that popular models use.
HEADERS = """{{- bos_token }}
{%- if tools is not none %}{{- '<|head|>system<|/head|>\\n\\nTools:\\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}{{- '<|eot|>' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' or 'tool_calls' in message %}
        {{- '<|head|>ipython<|/head|>\\n\\n' }}{{- message | tojson }}{{- '<|eot|>' }}
    {%- else %}
        {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}
"""
NAMESPACES = """{%- set ns = namespace(last=-1, system='You are helpful.') %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- if messages[0].role == 'system' %}{%- set ns.system = messages[0].content %}{%- endif %}
{{- '<|im_start|>system\\n' + ns.system }}
{%- if tools %}{{- '\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools>' }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if loop.first and message.role == 'system' %}{%- continue %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{- message.content }}
    {%- elif message.content %}{%- for part in message.content %}{{- part.text }}{%- endfor %}{%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' }}{{- call.function.name }}{{- call.function.arguments | tojson }}{{- '</tool_call>' }}
    {%- endfor %}
    {%- if loop.index0 > ns.last %}
        {{- '<think></think>' if enable_thinking is defined and enable_thinking is false }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
ALTERNATING = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant!') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{% endif %}
{% endfor %}"""
TEMPLATES = {"headers": HEADERS, "namespaces": NAMESPACES, "alternating": ALTERNATING}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Wetter in <Köln> & "anderswo"',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "unit": "°C"}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": "Hi <there> & 'you'"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  spaced  "}],
    "two turns": [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "?"},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "21"},
    ],
}


def pair(template: str) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    backend = Backend(models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    reference = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)
    return Tokenizer(backend, special, {"default": template}), reference


def outcome(call: Any) -> str:
    try:
        return call()
    except Exception as error:
        return f"refused: {type(error).__name__ in ('TemplateError', 'UndefinedError', 'ChatTemplateError')}"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("mode", ["ask", "closed", "continue"])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}], ids=["", "thinking"])
def test_the_same_prompt_as_transformers(
    template: str, conversation: str, tools: Any, mode: str, variables: dict[str, Any]
) -> None:
    ours, reference = pair(TEMPLATES[template])
    messages = CONVERSATIONS[conversation]
    options = {"add_generation_prompt": mode == "ask", "continue_final_message": mode == "continue", **variables}
    expected = outcome(lambda: reference.apply_chat_template(messages, tools=tools, tokenize=False, **options))
    assert outcome(lambda: ours.apply_chat_template(messages, tools=tools, **options)) == expected


@settings(max_examples=50, deadline=None)
@given(content=st.text(max_size=60), continued=st.booleans())
def test_any_content_renders_as_in_transformers(content: str, continued: bool) -> None:
    for template in (HEADERS, NAMESPACES):
        ours, reference = pair(template)
        messages = [{"role": "user", "content": content}]
        options = {"add_generation_prompt": not continued, "continue_final_message": continued}
        expected = outcome(lambda o=options: reference.apply_chat_template(messages, tokenize=False, **o))  # noqa: B023
        assert outcome(lambda o=options: ours.apply_chat_template(messages, **o)) == expected  # noqa: B023


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append({'role': 'user'}) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ strftime_now.__globals__['json'] }}",
    ],
)
def test_a_hostile_template_gets_nowhere(attack: str) -> None:
    try:
        text = render(attack, [{"role": "user", "content": "hi"}])
    except ChatTemplateError:
        return
    assert text == ""  # what is private is undefined


def test_objects_with_methods_never_reach_the_template() -> None:
    with pytest.raises(ValueError, match="JSON values, got object"):
        render("{{ messages }}", [{"role": "user", "content": object()}])


def test_enums_and_models_become_plain_values() -> None:
    class Role(str, Enum):  # noqa: UP042  (what older code has)
        USER = "user"

    class Message:
        def model_dump(self) -> dict[str, Any]:
            return {"role": Role.USER, "content": "hi"}

    assert render("{{ messages[0].role }}:{{ messages | tojson }}", [Message()]) == (  # type: ignore[list-item]
        'user:[{"role": "user", "content": "hi"}]'
    )


def test_the_template_s_own_words_reach_the_caller() -> None:
    with pytest.raises(ValueError, match="Roles must alternate"):
        render(ALTERNATING, [{"role": "assistant", "content": "x"}])


def test_a_broken_template_names_the_line() -> None:
    with pytest.raises(ValueError, match="broken at line 2"):
        render("ok\n{% if %}", [])


def test_the_date_is_today() -> None:
    assert render("{{ strftime_now('%Y') }}", []) in (str(datetime.now().year), str(datetime.now().year - 1))


def test_a_model_without_a_template_says_what_to_do() -> None:
    ours, _ = pair("x")
    ours.chat_templates.clear()
    with pytest.raises(ValueError, match="--chat-template"):
        ours.apply_chat_template([{"role": "user", "content": "hi"}])


def test_named_templates_are_chosen_by_name_and_by_tools() -> None:
    ours, _ = pair("plain")
    ours.chat_templates["tool_use"] = "with tools"
    ours.chat_templates["rag"] = "with documents"
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(messages) == "plain"
    assert ours.apply_chat_template(messages, tools=TOOLS) == "with tools"
    assert ours.apply_chat_template(messages, chat_template="rag") == "with documents"
    assert ours.apply_chat_template(messages, chat_template="{{ messages[0].content }}!") == "hi!"


names = st.sampled_from(
    [
        "self",
        "template",
        "messages",
        "tools",
        "documents",
        "context",
        "environment",
        "loop",
        "caller",
        "range",
        "namespace",
        "raise_exception",
        "bos_token",
        "add_generation_prompt",
        "not a name",
        "",
        "None",
        "__class__",
    ]
) | st.text(max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([HEADERS, NAMESPACES, "{{ self }}{{ x }}{{ messages[0].content }}"]),
    st.dictionaries(names, json_values, max_size=4),
)
def test_variables_of_any_name_are_taken_or_refused(template, variables):
    """And never stand for the conversation itself."""
    messages = [{"role": "user", "content": "the question"}]
    try:
        check_variables(variables, "chat_template_kwargs")
        assert "the question" in pair(template)[0].apply_chat_template(messages, **variables)
    except ValueError as error:
        assert isinstance(error, ChatTemplateError) or str(error).startswith("chat_template_kwargs must not hold")
