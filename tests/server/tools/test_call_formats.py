"""The format of calls is the one that reads back what the chat template writes; a template whose calls none reads has
its model told of tools in a prompt of our own, and the log says so."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from octavo.chat.thought_tags import HUNYUAN
from octavo.chat.thoughts import thoughts_of
from octavo.chat.tools.choice import format_of
from octavo.chat.tools.formats.row import Params
from octavo.chat.tools.formats.table import TOOL_FORMATS
from octavo.chat.tools.prompt_fallback import tell_of_tools, with_calls_as_text

HEAD = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
TAIL = "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
EACH = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
ITEMS = "{% for k, v in f.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"


def template(calls: str, head: str = HEAD) -> str:
    return head + calls + TAIL


# Shorter templates of the structure of the families' own.
XML = (
    EACH + "\n<tool_call>\n<function={{ f.name }}>\n" + ITEMS + "<parameter={{ k }}>\n" + VALUE + "\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}"
)
SEED = (
    EACH + "<seed:tool_call>\n<function={{ f.name }}>\n" + ITEMS + "<parameter={{ k }}>" + VALUE + "</parameter>\n"
    "{% endfor %}</function>\n</seed:tool_call>{% endfor %}"
)
GLM = (
    EACH + "\n<tool_call>{{ f.name }}\n" + ITEMS + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + VALUE + "</arg_value>\n"
    "{% endfor %}</tool_call>{% endfor %}"
)
BODY = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
HERMES = EACH + "\n<tool_call>\n" + BODY + "\n</tool_call>{% endfor %}"
MINIMAX = (
    "{% if m.tool_calls %}\n<minimax:tool_call>\n"
    + EACH
    + '<invoke name="{{ f.name }}">\n'
    + ITEMS
    + '<parameter name="{{ k }}">'
    + VALUE
    + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}"
    "</minimax:tool_call>{% endif %}"
)
DSML = (
    "{% if m.tool_calls %}\n\n<｜DSML｜function_calls>\n"
    + EACH
    + '<｜DSML｜invoke name="{{ f.name }}">\n'
    + ITEMS
    + '<｜DSML｜parameter name="{{ k }}" string="{{ "true" if v is string else "false" }}">'
    + VALUE
    + "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n{% endfor %}</｜DSML｜function_calls>{% endif %}"
)
COMMAND = (
    "{% if m.tool_calls %}<|START_ACTION|>[" + EACH + '\n    {"tool_call_id": "{{ loop.index0 }}", "tool_name": '
    '"{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% if not loop.last %},{% endif %}{% endfor %}\n]'
    "<|END_ACTION|>{% endif %}"
)
DEEPSEEK = (  # takes arguments as text alone
    "{% if m.tool_calls %}<｜tool▁calls▁begin｜>" + EACH + "{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' "
    "+ f.arguments + '<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
)
DEEPSEEK_V3 = (
    "{% if m.tool_calls %}<｜tool▁calls▁begin｜>" + EACH + "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + f.name "
    "+ '\n```json\n' + f.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
)
LISTED = BODY + '{{ ", " if not loop.last }}{% endfor %}'
ONE_ONLY = (
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% endif %}"
)
PYTHON = (
    "{% if m.tool_calls %}<|tool_call_start|>[" + EACH + "{{ f.name }}(" + ITEMS + "{{ k }}={{ v | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]<|tool_call_end|>{% endif %}"
)
KIMI = (
    "{% if m.tool_calls %}<|tool_calls_section_begin|>" + EACH + "<|tool_call_begin|>functions.{{ f.name }}:"
    "{{ loop.index0 }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}"
)
SOLAR = (
    "{% if m.tool_calls %}<|tool_calls|>" + EACH + "<|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ f.name }}"
    "<|tool_call:args|>{{ f.arguments | tojson }}<|tool_call:end|>{% endfor %}<|calls|>{% endif %}"
)
KIND = "{{ 'string' if v is string else 'boolean' if v is boolean else 'number' if v is number else 'object' }}"
KIMI3 = (
    "{% if m.tool_calls %}<|open|>tools<|sep|>" + EACH + '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"'
    "<|sep|>" + ITEMS + '<|open|>argument key="{{ k }}" type="' + KIND + '"<|sep|>' + VALUE + "<|close|>argument"
    "<|sep|>{% endfor %}<|close|>call<|sep|>{% endfor %}<|close|>tools<|sep|>{% endif %}"
)
GEMMA = (
    '{% macro typed(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}{% raw %}{{% endraw %}'
    "{% for k, i in v.items() %}{{ k }}:{{ typed(i) }}{{ ',' if not loop.last }}{% endfor %}{% raw %}}{% endraw %}"
    "{% elif v is sequence %}[{% for i in v %}{{ typed(i) }}{{ ',' if not loop.last }}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
    + EACH
    + "<|tool_call>call:{{ f.name }}{{ typed(f.arguments) }}<tool_call|>{% endfor %}"
)
M3 = (
    "{% macro tree(v) %}{% if v is mapping %}{% for k, i in v.items() %}]<]minimax[>[<{{ k }}>{{ tree(i) }}"
    "]<]minimax[>[</{{ k }}>{% endfor %}{% elif v is string %}{{ v }}{% elif v is sequence %}{% for i in v %}"
    "]<]minimax[>[<item>{{ tree(i) }}]<]minimax[>[</item>{% endfor %}{% else %}{{ v | tojson }}{% endif %}"
    "{% endmacro %}"
    "{% if m.tool_calls %}]<]minimax[>[<tool_call>\n" + EACH + ']<]minimax[>[<invoke name="{{ f.name }}">'
    "{{ tree(f.arguments) }}]<]minimax[>[</invoke>\n{% endfor %}]<]minimax[>[</tool_call>{% endif %}"
)
HY = (
    "{% if m.tool_calls %}<tool_calls:opensource>\n"
    + EACH
    + "<tool_call:opensource>{{ f.name }}<tool_sep:opensource>\n"
    + ITEMS
    + "<arg_key:opensource>{{ k }}</arg_key:opensource>\n<arg_value:opensource>"
    + VALUE
    + "</arg_value:opensource>\n{% endfor %}</tool_call:opensource>\n{% endfor %}</tool_calls:opensource>{% endif %}"
)
HY4 = HY.replace("<tool_sep:opensource>", "").replace("opensource", "6124c78e")
CPM = (
    EACH + '<function name="{{ f.name }}">' + ITEMS + '<param name="{{ k }}">{% if v is string and "<" in v %}'
    "<![CDATA[{{ v }}]]>{% else %}{{ v }}{% endif %}</param>{% endfor %}</function>\n{% endfor %}"
)
KEYED = '{"{{ f.name }}": {{ f.arguments | tojson }}}{{ ", " if not loop.last }}{% endfor %}'
THINKING = HEAD.replace("{{ m.content }}", "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}")
WRITTEN = {
    "qwen3_xml": (XML, "qwen3_xml"),
    "seed_oss": (SEED, "seed_oss"),
    "glm45": (GLM, "glm45"),
    "glm47": (GLM.replace("}}\n<", "}}<").replace("</arg_key>\n", "</arg_key>"), "glm45"),
    "hermes": (HERMES, "hermes"),
    "minimax_m2": (MINIMAX, "minimax_m2"),
    "deepseek_v32": (DSML, "deepseek_v32"),
    "deepseek_v4": (DSML.replace("function_calls", "tool_calls"), "deepseek_v4"),
    "command": (COMMAND, "cohere_command3"),
    "deepseek_v31": (DEEPSEEK, "deepseek_v31"),
    "deepseek_v3": (DEEPSEEK_V3, "deepseek_v3"),
    "mistral": ("{% if m.tool_calls %}[TOOL_CALLS][" + EACH + LISTED + "]{% endif %}", "mistral"),
    "mistral v13": (EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}", "mistral"),
    "hunyuan": ("{% if m.tool_calls %}<tool_calls>[" + EACH + LISTED + "]</tool_calls>{% endif %}", "hunyuan_a13b"),
    "nemotron": ("{% if m.tool_calls %}<TOOLCALL>[" + EACH + LISTED + "]</TOOLCALL>{% endif %}", "nemotron_nano_v2"),
    "granite": ("{% if m.tool_calls %}<|tool_call|>[" + EACH + LISTED + "]{% endif %}", "granite"),
    "llama3": (ONE_ONLY, "llama3_json"),
    "lfm2": (PYTHON, "lfm2"),
    "kimi_k2": (KIMI, "kimi_k2"),
    "kimi_k3": (KIMI3, "kimi_k3"),
    "solar": (SOLAR, "solar"),
    "gemma4": (GEMMA, "gemma4"),
    "minimax_m3": (M3, "minimax_m3"),
    "hy_v3": (HY, "hy_v3"),
    "hy_v3 of another checkpoint": (HY.replace("opensource", "6124c78e"), "hy_v3"),
    "hy_v4": (HY4, "hy_v4"),
    "hy_v4 without a suffix": (HY4.replace(":6124c78e", ""), "hy_v4"),
    "minicpm5": (CPM, "minicpm5"),
    "apertus": ("{% if m.tool_calls %}<|tools_prefix|>[" + EACH + KEYED + "]<|tools_suffix|>{% endif %}", "apertus"),
    "gigachat3": (EACH + "<|function_call|>" + BODY + "<|message_sep|>{% endfor %}", "gigachat3"),
    "functionary": (
        EACH + "<function={{ f.name }}>{{ f.arguments | tojson }}</function>{% endfor %}",
        "functionary_v3_1",
    ),
    "functionary 3.2": (EACH + ">>>{{ f.name }}\n{{ f.arguments | tojson }}{% endfor %}", "functionary_v3_2"),
    "muse": (
        EACH
        + '<|start|>assistant to={{ f.name }}<|message|><atem:function_calls>\n<atem:invoke name="{{ f.name }}">\n'
        + ITEMS
        + '<atem:parameter name="{{ k }}">'
        + VALUE
        + "</atem:parameter>\n{% endfor %}</atem:invoke>\n"
        "</atem:function_calls><|eom|>{% endfor %}",
        "muse_glimmer",
    ),
    "phi4": ("{% if m.tool_calls %} functools[" + EACH + LISTED + "]{% endif %}", "phi4_mini_json"),
    "pythonic": (PYTHON.replace("<|tool_call_start|>", "").replace("<|tool_call_end|>", ""), "pythonic"),
}


@pytest.mark.parametrize("family", WRITTEN)
def test_the_format_is_the_one_that_reads_the_templates_calls_back(family):
    calls, name = WRITTEN[family]
    found = format_of(template(calls))
    assert (found.parser, found.how) == (name, "read back")
    assert found.arguments_as_text is (family in ("deepseek_v3", "deepseek_v31"))
    thinking = format_of(
        template(calls, THINKING).replace("<|assistant|>\n{% endif", "<|assistant|>\n<think>\n{% endif")
    )
    assert thinking.parser == name or family in ("llama3", "pythonic")  # whose calls begin an answer


@pytest.mark.parametrize("suffix", ["", ":mine", ":v4.1"])
def test_the_suffix_of_hunyuans_marks_is_the_templates(suffix):
    """In the format and in the thoughts, told by the template or opened by the prompt, with the flags and without."""
    calls = HY.replace(":opensource", suffix)
    head = HEAD.replace(
        "{{ m.content }}", "{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}{{ m.content }}"
    )
    for flag in (None, "hy_v3"):
        found = format_of(template(calls), flag)
        assert found.parser == "hy_v3"
        row = found.row
        assert row.section == (f"<tool_calls{suffix}>", f"</tool_calls{suffix}>")
        assert isinstance(row.arguments, Params) and row.arguments.key == f"<arg_key{suffix}>"
        assert row.thoughts == (f"<think{suffix}>", f"</think{suffix}>") and row.header == f"{{name}}<tool_sep{suffix}>"
        assert ":opensource" not in repr(replace(row, suffix=""))
        tagged = head.replace("think>", f"think{suffix}>")
        opened = template(calls).replace("<|assistant|>\n{% endif", f"<|assistant|>\n<think{suffix}>{{% endif")
        for whole in (template(calls, tagged), opened) if suffix else ():
            assert thoughts_of(whole, flag).tags == replace(HUNYUAN, opening=row.thoughts[0], closing=row.thoughts[1])


BARE = {
    "qwen3_xml": XML.replace("\n<tool_call>\n", "").replace("\n</tool_call>", ""),
    "kimi_k2": KIMI.replace("<|tool_calls_section_begin|>", "").replace("<|tool_calls_section_end|>", ""),
    "deepseek_v31": DEEPSEEK.replace("<｜tool▁calls▁begin｜>", "").replace("<｜tool▁calls▁end｜>", ""),
}


@pytest.mark.parametrize("name", BARE)
def test_a_template_may_write_calls_without_their_section(name):
    found = format_of(template(BARE[name]))
    assert (found.parser, found.how) == (name, "read back")


@pytest.mark.parametrize(
    "calls",
    [
        EACH + "<tool_call>[{{ f.name }}]{{ f.arguments | tojson }}</tool_call>{% endfor %}",
        EACH + "<tool_call>{{ f.name }}: {{ f.arguments }}</tool_call>{% endfor %}",  # as Python prints it
        EACH + '{"call": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}',
        EACH + "<|tool_call>{{ f.name }}-{{ f.arguments }}<tool_call|>{% endfor %}",
        XML.replace("parameter", "param"),
        HERMES.replace("{{ f.arguments | tojson }}", '{"text": "always the same"}'),
        '{# <tool_call> #}{# "parameters": #}',
    ],
)
def test_a_format_that_none_reads_has_the_generic_prompt_and_a_line_in_the_log(calls, caplog):
    unknown = template(calls) + "{# " + str(hash(calls)) + " #}"
    with caplog.at_level(logging.INFO, logger="octavo"):
        assert format_of(unknown).generic and format_of(unknown).parser == "hermes"
    assert len(caplog.records) == 1 and caplog.records[0].levelno == logging.WARNING
    assert "generic prompt" in caplog.text and "--tool-call-parser" in caplog.text


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('Answer <tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <args>}\\n</tool_call>', "hermes"),
        (
            "Answer <tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>",
            "qwen3_xml",
        ),
        ("Answer <tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>", "glm45"),
        ('<|START_ACTION|>[{"tool_name": "name", "parameters": {}}]<|END_ACTION|>', "cohere_command3"),
        ("{% for t in tools %}[TOOL_CALLS]", "mistral"),
        ('tools: {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("tools [func_name1(params_name1=params_value1)]", "pythonic"),
        ("Write <|tool_call|> and then a list", "granite"),
        ("Answer <tool_call>", None),
        ('{{ t.name }}: {"parameters": {}}', None),
    ],
)
def test_a_template_that_writes_no_calls_is_known_by_the_form_that_it_describes(text, name):
    told = "{% if tools %}{{ tools }}{{ '' }}" + text.replace("{% for t in tools %}", "") + "{% endif %}"
    found = format_of(told + "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert (found.parser, found.how) == ((name, "described") if name else ("hermes", "generic"))


def test_a_flag_overrides_what_the_template_says_and_the_log_tells(caplog):
    with caplog.at_level(logging.INFO, logger="octavo"):
        found = format_of(template(XML + "{# flag #}"), "hermes")
    assert found.parser == "hermes" and not found.generic
    assert "by the template they would be qwen3_xml" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="octavo"):
        assert format_of(template(XML + "{# flag #}"), "qwen3_coder").parser == "qwen3_coder"
    assert not caplog.records


def test_names_of_one_format_are_the_same_format():
    for name, other in (("qwen3_coder", "qwen3_xml"), ("glm47", "glm45"), ("qwen3_json", "hermes")):
        assert TOOL_FORMATS[name] is TOOL_FORMATS[other]


def test_a_template_that_writes_calls_and_describes_no_tools_keeps_its_format():
    blind = template(DEEPSEEK, HEAD.partition("{% for m")[1] + HEAD.partition("{% for m")[2])
    found = format_of(blind)
    assert (found.parser, found.how, found.told, found.writes) == ("deepseek_v31", "read back", False, True)
    tools = [{"type": "function", "function": {"name": "now"}}]
    (system, user) = tell_of_tools([{"role": "user", "content": "Hi"}], tools, found.row, results=False)
    assert '{"name": "now"}' in system["content"] and user == {"role": "user", "content": "Hi"}
    assert "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function name<｜tool▁sep｜>{" in system["content"]


def test_a_template_that_writes_calls_only_beside_null_gets_null():
    shy = template(HERMES.replace("m.tool_calls or []", "(m.tool_calls if m.content is none else [])"))
    found = format_of(shy)
    assert (found.parser, found.how, found.needs_none) == ("hermes", "read back", True)


def test_calls_that_a_template_drops_are_written_into_their_messages():
    told = "{% if tools %}{{ tools | tojson }}<|tool_list_start|>{% endif %}"
    found = format_of(told + "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert (found.parser, found.told, found.writes) == ("lfm2", True, False)
    calls = [{"type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}]
    messages = [{"role": "assistant", "content": "Wait.", "tool_calls": calls}, {"role": "tool", "content": "12"}]
    written = {"role": "assistant", "content": "Wait.\n<|tool_call_start|>[now(zone='UTC')]<|tool_call_end|>"}
    assert with_calls_as_text(messages, found.row) == [written, messages[1]]


def test_a_template_without_tools_has_the_generic_prompt():
    assert format_of("{% for m in messages %}{{ m.content }}{% endfor %}").generic


def test_a_template_that_fails_is_no_reason_to_fail():
    for broken in ("{% if tools %}", "{{ tools.a.b }}", "{{ raise_exception('no tools') }}"):
        assert format_of(broken).generic
