"""The report of a chat template: its formats, its switches, and what a next turn loses of the cache."""

from __future__ import annotations

import argparse
import json

import pytest
from tests.support.reciting import Recital, small_tokenizer, write_reciting_model

from octavo.chat.options import ChatOptions
from octavo.chat.report import chat_report, in_words, tool_format
from octavo.cli import show
from octavo.errors import ModelError

CALLS = (
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
)


def template(kept: str, opening: str = "<think>\n", body: str = CALLS) -> str:
    """One that writes the thoughts of turns where the expression ``kept`` is true."""
    return (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% set ns = namespace(last=-1) %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
        "<|{{ m.role }}|>{% if m.reasoning_content and (" + kept + ") %}" + opening + "{{ m.reasoning_content }}"
        "\n</think>\n\n{% endif %}{{ m.content }}" + body + "<|end|>{% endfor %}{% if add_generation_prompt %}"
        "<|assistant|>" + opening + "{{ '\n</think>\n\n' if enable_thinking is false }}{% endif %}"
    )


LAST = "loop.index0 > ns.last"


def test_a_template_that_keeps_all_loses_nothing():
    report = chat_report(template("true"))
    assert (report.calls, report.calls_how, report.calls_told_by) == ("hermes", "read back", "template")
    assert (report.thoughts, report.thoughts_how) == (("<think>", "</think>"), "read back")
    assert report.thinks_by_default and report.thoughts_off == {"enable_thinking": False}
    assert report.after_a_tool_result.keeps and report.after_a_user_message.keeps


def test_thoughts_that_a_users_message_drops_are_told_with_the_switch_that_keeps_them():
    report = chat_report(template(LAST))
    assert report.after_a_tool_result.keeps and not report.after_a_user_message.keeps
    assert report.after_a_user_message.why == "drops earlier thoughts" and not report.after_a_user_message.kept_by
    switched = chat_report(template(LAST + " or preserve_thinking"))
    assert switched.after_a_user_message.kept_by == {"preserve_thinking": True}
    assert in_words(switched)["after_a_user_message"] == (
        "the template drops earlier thoughts (preserve_thinking=true keeps it)"
    )


def test_tags_that_only_the_prompt_writes_are_told():
    report = chat_report(template("false"))
    assert report.after_a_tool_result.why == "drops the tags of thoughts that the prompt wrote"


def test_a_flag_is_in_the_report():
    report = chat_report(template("true"), ChatOptions(tool_call_parser="qwen3_xml", reasoning_parser="none"))
    assert (report.calls, report.calls_how, report.thoughts) == ("qwen3_xml", "flag", None)


def test_the_format_that_a_flag_names_is_shown_for_a_template_that_knows_no_tools():
    plain = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    assert tool_format(plain, ChatOptions(tool_call_parser="mistral")) == "mistral"
    assert tool_format(plain, ChatOptions()) == "generic"


def test_a_plain_template_has_a_short_report():
    report = chat_report("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}")
    assert in_words(report)["tool_calls"] == "hermes (generic; a prompt of our own describes the tools)"
    assert report.thoughts is None and in_words(report)["reasoning"] == "none shown"
    assert not report.thinks_by_default and "off_by" not in in_words(report)


def args(model, **given) -> argparse.Namespace:
    return argparse.Namespace(model=str(model), download_dir=None, chat=True, **{"json": False, **given})


def test_octavo_show_prints_it(tmp_path, capsys):
    said = Recital({"what time is it now, please": "noon"}, template(LAST), "<|end|>")
    write_reciting_model(tmp_path / "model", small_tokenizer(["what time is it now"], ["<|end|>"], ["<think>"]), said)
    assert show.run(args(tmp_path / "model")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split(maxsplit=2) == ["tool", "calls", "hermes (read back)"]
    assert "after a user message  the template drops earlier thoughts" in lines
    assert show.run(args(tmp_path / "model", json=True)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(json.dumps(chat_report(template(LAST)).as_dict()))
    assert found["thoughts_off"] == {"enable_thinking": False} and found["after_a_user_message"]["keeps"] is False
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelError, match="chat template"):
        show.run(args(tmp_path / "model"))
