"""Thoughts of earlier turns stay in the prompt where the template has a variable for that, unless they shall not."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from tests.server.tools.test_chat_report import LAST, template
from tests.server.tools.test_harmony import TEMPLATE as HARMONY
from tests.server.tools.test_replay import FAMILIES, TOOLS

from octavo.chat.earlier_thoughts import EarlierThoughts, earlier_thoughts_of, warn_where_lost
from octavo.chat.messages import Conversation, check_messages
from octavo.chat.options import PRESERVE, ChatOptions
from octavo.chat.render import render

CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"path": "a"}'}}
SWITCHES = {"qwen3.5": {"preserve_thinking": True}, "glm-4.7": {"clear_thinking": False}}
LOOP: list[dict[str, Any]] = [
    {"role": "user", "content": "Look it up."},
    {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "found"},
    {"role": "assistant", "content": "It is there.", "reasoning_content": "So it was."},
    {"role": "user", "content": "And now?"},
]


def ids_of(name: str, messages: list[dict[str, Any]], wish: bool | None = None, **options: Any) -> list[int]:
    tokenizer = FAMILIES[name].tokenizer()
    given = options.pop("given", None)
    conversation = Conversation(check_messages(messages), TOOLS, chat_template_kwargs=given, keeps_thoughts=wish)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    return render(conversation, ChatOptions(**options), tokenizer, encode, str).ids


def kept(name: str, **how: Any) -> list[bool]:
    """For each of three turns, whether its prompt begins with the one before."""
    prompts = [ids_of(name, LOOP[:end], **how) for end in (1, 3, 5)]
    return [after[: len(before)] == before for before, after in pairwise(prompts)]


@pytest.mark.parametrize("name", SWITCHES)
def test_a_loop_keeps_its_prefix_unless_it_is_told_not_to(name: str) -> None:
    assert earlier_thoughts_of(FAMILIES[name].template) == EarlierThoughts(keep=SWITCHES[name])
    for preserve in ("auto", "always"):
        assert kept(name, preserve_reasoning=preserve) == [True, True]
    assert kept(name, preserve_reasoning="never") == [True, False]


@pytest.mark.parametrize("name", SWITCHES)
def test_a_request_decides_where_the_flag_does_not(name: str) -> None:
    for wish, found in ((None, [True, True]), (True, [True, True]), (False, [True, False])):
        assert kept(name, wish=wish) == found
        assert kept(name, wish=wish, preserve_reasoning="always") == [True, True]
        assert kept(name, wish=wish, preserve_reasoning="never") == [True, False]


@pytest.mark.parametrize("name", SWITCHES)
def test_variables_win_over_flag_and_wish_those_of_the_request_first(name: str) -> None:
    on = SWITCHES[name]
    off = {variable: not value for variable, value in on.items()}
    for preserve in PRESERVE:
        how = {"preserve_reasoning": preserve, "wish": preserve != "auto"}
        assert kept(name, **how, default_chat_template_kwargs=off) == [True, False]
        assert kept(name, **how, default_chat_template_kwargs=off, given=on) == [True, True]
        assert kept(name, **how, default_chat_template_kwargs=on, given=off) == [True, False]


def test_a_template_that_keeps_them_by_default_can_be_told_to_drop_them() -> None:
    found = earlier_thoughts_of(template(LAST + " or preserve_thinking is not false"))
    assert found == EarlierThoughts(drop={"preserve_thinking": False})
    assert found.variables("auto", None) == {} == found.variables("always", False)
    assert found.variables("auto", False) == found.variables("never", True) == {"preserve_thinking": False}


def test_arguments_may_be_text() -> None:
    body = "{% for c in m.tool_calls or [] %}{{ 'call ' + c.function.arguments }}{% endfor %}"
    assert earlier_thoughts_of(template(LAST + " or preserve_thinking", body=body)).keep == {"preserve_thinking": True}


@pytest.mark.parametrize(
    "text",
    [
        HARMONY,
        template("true"),
        template(LAST),
        template(LAST) + "{# preserve_thinking #}",
        template(LAST + " or preserve_thinking") + "{% for i in range(99999) %}{{ 'long' * 999 }}{% endfor %}",
        "{{ raise_exception('preserve_thinking') }}",
    ],
    ids=["harmony", "keeps all", "no variable", "only names it", "too much", "refuses"],
)
def test_nothing_is_set_where_nothing_would_keep_them(text: str) -> None:
    assert earlier_thoughts_of(text) == EarlierThoughts()


def test_thoughts_that_nothing_can_keep_are_told(caplog: pytest.LogCaptureFixture) -> None:
    for text in (template("true"), template(LAST + " or preserve_thinking")):
        warn_where_lost(text)
    assert not caplog.messages
    warn_where_lost(template(LAST))
    assert "no variable keeps them" in caplog.text
