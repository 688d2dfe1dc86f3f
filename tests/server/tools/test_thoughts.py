"""A template shows its model's thoughts, and what switches them: found by rendering, and obeyed in prompts."""

from __future__ import annotations

import argparse
import logging

import pytest
from tests.support.reciting import small_tokenizer

from octavo.chat.messages import Conversation, check_messages
from octavo.chat.options import ChatOptions
from octavo.chat.render import render
from octavo.chat.switches import nearest
from octavo.chat.thought_tags import REASONING_PARSERS
from octavo.chat.thoughts import thoughts_of
from octavo.chat.tools.formats.table import TOOL_CALL_PARSERS
from octavo.errors import FieldError
from octavo.flags.server_flags import add_server_flags
from octavo.interface.outputs import CompletionOutput
from octavo.text.tokenizer import Tokenizer

TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
SPOKEN = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}OPEN{{ m.reasoning_content }}CLOSE{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}"
)


def asked(prompt: str, turns: str = TURNS) -> str:
    return turns + "{% if add_generation_prompt %}<|assistant|>" + prompt + "{% endif %}"


def spoken(opening: str, closing: str, prompt: str = "") -> str:
    return asked(prompt, SPOKEN.replace("OPEN", opening).replace("CLOSE", closing))


OFF_BY_TAG = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
ON_BY_TAG = "{% if thinking %}<think>{% else %}</think>{% endif %}"
EFFORTS = (
    "{% set e = reasoning_effort if reasoning_effort is defined else 'no_think' %}{% if e not in ['no_think', 'low', "
    "'high'] %}{{ raise_exception('low or high') }}{% endif %}{{ '<think>' if e != 'no_think' else '<think></think>' }}"
)
# Short templates of the families' structure: tags, how they are found, on by default, what turns them on and off.
FAMILIES = {
    "qwen3": (
        spoken("<think>\n", "\n</think>\n\n", OFF_BY_TAG),
        ("<think>", "</think>"),
        "read back",
        True,
        {"enable_thinking": True},
        {"enable_thinking": False},
    ),
    "hy4": (
        asked(
            ON_BY_TAG.replace("think>", "think{}>")
            .replace("<think{}>", "{{ '<think{}>'.format(':6124c78e') }}")
            .replace("</think{}>", "{{ '</think{}>'.format(':6124c78e') }}")
        ),
        ("<think:6124c78e>", "</think:6124c78e>"),
        "opened by the prompt",
        False,
        {"thinking": True},
        {"thinking": False},
    ),
    "hy of another checkpoint": (
        asked(ON_BY_TAG.replace("think>", "think:0a1b>")),
        ("<think:0a1b>", "</think:0a1b>"),
        "opened by the prompt",
        False,
        {"thinking": True},
        {"thinking": False},
    ),
    "deepseek v3.1": (
        asked(ON_BY_TAG),
        ("<think>", "</think>"),
        "opened by the prompt",
        False,
        {"thinking": True},
        {"thinking": False},
    ),
    "deepseek r1": (
        asked("<think>\n", TURNS.replace("m.content", "m.content.split('</think>')[-1]")),
        ("<think>", "</think>"),
        "opened by the prompt",
        True,
        {},
        None,
    ),
    "kimi k2 thinking": (
        asked("", TURNS.replace("m.content", "m.content.split('</think>')[-1]")),
        ("<think>", "</think>"),
        "described",
        True,
        {},
        None,
    ),
    "seed": (
        spoken("<seed:think>", "</seed:think>", "{{ '<seed:think></seed:think>' if thinking_budget == 0 }}"),
        ("<seed:think>", "</seed:think>"),
        "read back",
        True,
        {},
        {"thinking_budget": 0},
    ),
    "hy3": (
        asked(EFFORTS),
        ("<think>", "</think>"),
        "opened by the prompt",
        False,
        {"reasoning_effort": "high"},
        {"reasoning_effort": "no_think"},
    ),
    "minimax m3": (
        spoken("<mm:think>", "</mm:think>", "{{ '</mm:think>' if thinking_mode == 'disabled' }}"),
        ("<mm:think>", "</mm:think>"),
        "read back",
        True,
        {"thinking_mode": "enabled"},
        {"thinking_mode": "disabled"},
    ),
    "gemma 4": (
        asked("{{ '' if enable_thinking else '<|channel>thought\n<channel|>' }}"),
        ("<|channel>thought", "<channel|>"),
        "described",
        False,
        {"enable_thinking": True},
        {"enable_thinking": False},
    ),
    "muse": (
        "{% for m in messages %}{% if m.reasoning_content %}<|start|>assistant to=self<|message|>"
        "{{ m.reasoning_content }}<|eom|>{% endif %}<|start|>{{ m.role }} to=user<|message|>{{ m.content }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
        ("to=self<|message|>", "<|eom|>"),
        "read back",
        True,
        {},
        None,
    ),
    "apriel": (
        asked("Here are my reasoning steps:\n{# [BEGIN FINAL RESPONSE] #}"),
        ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
        "opened by the prompt",
        True,
        {},
        None,
    ),
    "unheard of": (spoken("<inner>", "</inner>"), ("<inner>", "</inner>"), "read back", True, {}, None),
    "plain": (TURNS, None, "none", True, {}, None),
    "a message for thoughts": (spoken("", "<|end|><|assistant|>"), None, "none", True, {}, None),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_tags_and_switches_are_found_by_rendering(name):
    template, tags, how, by_default, on, off = FAMILIES[name]
    found = thoughts_of(template)
    assert (found.tags.around if found.tags else None, found.how) == (tags, how)
    assert (found.switches.by_default, dict(found.switches.on), found.switches.off) == (by_default, on, off)


def test_efforts_that_a_template_refuses_are_the_nearest_that_it_takes():
    efforts = thoughts_of(FAMILIES["hy3"][0]).switches.efforts
    assert efforts == {"reasoning_effort": ("low", "high")}
    for effort, expected in (("minimal", "low"), ("low", "low"), ("medium", "high"), ("max", "high"), ("odd", "odd")):
        assert nearest(effort, efforts["reasoning_effort"]) == expected


def test_a_template_that_takes_too_much_is_left_alone_and_said(caplog):
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}</think>"
    with caplog.at_level(logging.WARNING):
        assert thoughts_of(endless).tags is None
    assert "so thoughts are not looked for" in caplog.text


def test_a_flag_overrides_the_template_and_the_log_says_what_it_shows(caplog):
    template = FAMILIES["seed"][0]
    with caplog.at_level(logging.WARNING):
        assert thoughts_of(template, "qwen3").tags.around == ("<think>", "</think>")
    assert "by the template they would be <seed:think> ... </seed:think> (read back)" in caplog.text
    assert thoughts_of(template, "none").tags is None
    assert thoughts_of(template, "auto") == thoughts_of(template)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(small_tokenizer(["Is it so?"], ["<|end|>"]), {})


def prepared(tokenizer: Tokenizer, template: str, options: dict | None = None, **wishes):
    conversation = Conversation(check_messages([{"role": "user", "content": "Hi"}]), **wishes)
    return render(conversation, ChatOptions(template, **options or {}), tokenizer, tokenizer.encode, str)


def end_of(tokenizer: Tokenizer, name: str, options: dict | None = None, **wishes) -> str:
    text = prepared(tokenizer, FAMILIES[name][0], options, **wishes).text
    return text.rpartition("<|assistant|>")[2]


@pytest.mark.parametrize(
    ("name", "wishes", "expected"),
    [
        ("qwen3", {}, ""),
        ("qwen3", {"thinking": False}, "<think>\n\n</think>\n\n"),
        ("qwen3", {"reasoning_effort": "none"}, "<think>\n\n</think>\n\n"),
        ("qwen3", {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, ""),
        ("qwen3", {"reasoning_effort": "low"}, ""),
        ("deepseek v3.1", {}, "</think>"),
        ("deepseek v3.1", {"thinking": True}, "<think>"),
        ("deepseek v3.1", {"reasoning_effort": "low"}, "<think>"),
        ("deepseek v3.1", {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False}}, "</think>"),
        ("hy3", {}, "<think></think>"),
        ("hy3", {"thinking": True}, "<think>"),
        ("hy3", {"reasoning_effort": "medium"}, "<think>"),
        ("hy3", {"reasoning_effort": "none"}, "<think></think>"),
        ("seed", {"thinking": False}, "<seed:think></seed:think>"),
        ("deepseek r1", {"thinking": False}, "<think>\n\n</think>\n\n"),
        ("kimi k2 thinking", {"reasoning_effort": "none"}, "<think>\n\n</think>\n\n"),
        ("unheard of", {"thinking": False}, "<inner></inner>"),
        ("muse", {"thinking": False}, " to=self<|message|><|eom|><|start|>assistant"),
        ("apriel", {"thinking": False}, "Here are my reasoning steps:\n[BEGIN FINAL RESPONSE]"),
        ("plain", {"thinking": False, "reasoning_effort": "none"}, ""),
    ],
)
def test_a_request_that_switches_thoughts_is_obeyed(tokenizer, name, wishes, expected):
    template = FAMILIES[name][0]
    if name == "plain":
        template = asked("")
    assert prepared(tokenizer, template, **wishes).text.rpartition("<|assistant|>")[2] == expected


def test_the_servers_own_default_stands_against_an_effort_and_not_against_a_switch(tokenizer):
    options = {"default_chat_template_kwargs": {"enable_thinking": False}}
    off = "<think>\n\n</think>\n\n"
    assert end_of(tokenizer, "qwen3", options) == end_of(tokenizer, "qwen3", options, reasoning_effort="high") == off
    assert end_of(tokenizer, "qwen3", options, thinking=True) == ""


def answer(rendered, text: str, reason: str = "stop") -> tuple[str, str]:
    completion = CompletionOutput(index=0, text=text, token_ids=[1], finish_reason=reason)
    delta = rendered.new_parser().feed(completion)
    return delta.reasoning, delta.content


@pytest.mark.parametrize("name", [name for name, (_, tags, *_) in FAMILIES.items() if tags])
def test_thoughts_are_told_from_answers_without_a_flag(tokenizer, name):
    template, (opening, closing), *_ = FAMILIES[name]
    rendered = prepared(tokenizer, template, thinking=True)
    begins = "" if rendered.inside_reasoning else opening
    assert answer(rendered, f"{begins}So.{closing}\n\nYes.") == ("So.", "Yes.")
    assert answer(rendered, f"{begins}So, and never an end", "length") == ("So, and never an end", "")
    if not rendered.inside_reasoning:
        assert answer(rendered, "Yes.") == ("", "Yes.")
    off = prepared(tokenizer, template, thinking=False)
    assert not off.inside_reasoning and answer(off, "Yes.") == ("", "Yes.")
    silent = prepared(tokenizer, template, {"reasoning_parser": "none"}, thinking=True)
    assert answer(silent, f"{begins}So.{closing}\n\nYes.") == ("", f"{begins}So.{closing}\n\nYes.") and silent.is_plain


def test_an_answer_s_marks_are_no_content(tokenizer):
    rendered = prepared(tokenizer, asked("<|START_THINKING|>") + "{# <|START_RESPONSE|><|END_RESPONSE|> #}")
    text = "So.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>"
    assert answer(rendered, text) == ("So.", "Yes.")


def test_gemma_s_channels_are_no_content(tokenizer):
    rendered = prepared(tokenizer, spoken("<|channel>thought", "<channel|>"))
    assert not rendered.inside_reasoning
    assert answer(rendered, "<|channel>So.<channel|>Yes.") == ("So.", "Yes.")
    assert answer(rendered, "<|channel><|channel>thought\nSo.<channel|>Yes.") == ("So.", "Yes.")
    assert answer(rendered, "<|channel>thousands<channel|>Yes.<channel|>") == ("thousands", "Yes.")
    again = "<|channel>thought\nSo.<channel|>Yes.<|channel>thought\nOr.<channel|>"
    assert answer(rendered, again) == ("So.Or.", "Yes.")


# Values of the flags.


def test_without_a_parser_calls_stay_in_the_content(tokenizer):
    tools = [{"type": "function", "function": {"name": "now"}}]
    template = "{{ tools | tojson }}" + asked("")
    rendered = prepared(tokenizer, template, {"tool_call_parser": "none"}, tools=tools)
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert answer(rendered, call) == ("", call) and '"now"' in rendered.text
    assert answer(prepared(tokenizer, template, {"tool_call_parser": "auto"}, tools=tools), call) == ("", "")
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        with pytest.raises(FieldError, match="--tool-call-parser none") as refused:
            prepared(tokenizer, template, {"tool_call_parser": "none"}, tools=tools, tool_choice=choice)
        assert refused.value.param == "tool_choice"


# vLLM's, of its version 0.33.
CALL_PARSERS = """
dots deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 deepseek_v41 cohere_command3 cohere_command4 ernie45 glm45 glm47
ling3 granite-20b-fc granite granite4 hermes poolside_v1 hunyuan_a13b hy_v3 internlm jamba lfm2 kimi_k2 kimi_k3
k2_horizon llama3_json llama4_json llama4_pythonic longcat mimo minimax_m2 minimax_m3 minicpm5 mistral olmo3 plamo3
openai phi4_mini_json pythonic qwen3_coder qwen3_json qwen3_xml seed_oss step3 step3p5 xlam gigachat3
functiongemma gemma4 apertus hy_v4 muse_glimmer
"""
THOUGHT_PARSERS = """
deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 poolside_v1 cohere_command3 cohere_command4 ernie45 gemma4 glm45 glm47
ling3 openai_gptoss granite granite_thinking_parser holo2 hunyuan_a13b hy_v3 kimi_k2 kimi_k3 k2_horizon mimo minicpmv
minimax_m2 minimax_m3 mistral nemotron_v3 olmo3 plamo3 qwen3 seed_oss step3 step3p5 hy_v4
muse_glimmer
"""


def test_names_of_vllm_are_known():
    assert not {"auto", "none", *CALL_PARSERS.split()} - {*TOOL_CALL_PARSERS}
    assert not {"auto", "none", *THOUGHT_PARSERS.split()} - {*REASONING_PARSERS}


@pytest.mark.parametrize(
    ("flag", "name"), [("--tool-call-parser", "inkling"), ("--reasoning-parser", "minimax_m2_append_think")]
)
def test_a_parser_that_is_not_known_is_refused_with_a_way_out(flag, name, capsys):
    parser = argparse.ArgumentParser()
    add_server_flags(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([flag, name])
    assert "leave it out: the chat template tells" in capsys.readouterr().err
