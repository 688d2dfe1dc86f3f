"""Images in tools' results stand in the prompt, whatever places for them a chat template knows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.chat.result_images import with_result_images
from octavo.chat.system_messages import rendered
from octavo.chat.tools.prompt_fallback import with_results_as_text
from octavo.errors import FieldError
from octavo.text.chat_template import ChatTemplateError, render
from octavo.text.content_format import PARTS, with_parts

_SHOW = (
    "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{% endmacro %}"
)
_USER = "{% if m.role == 'user' %}{{ show(m.content) }}{% else %}"
_TEXTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{{ part.text or '' }}{% endfor %}"
    "{% endif %}"
)
# How a template shows a message, by what it does with images in results.
TEMPLATES = {
    "shows them": "{{ show(m.content) }}",
    "knows texts alone": "{{ m.content }}",
    "drops them": _USER + _TEXTS + "{% endif %}",
    "prints lists": _USER + "{{ m.content }}{% endif %}",
    "refuses lists": _USER + "{{ 'result ' + m.content }}{% endif %}",
    # As Mistral's, which also refuses a user who speaks behind a result.
    "refuses another turn": "{% if not loop.first and m.role == 'user' and before.role == 'tool' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set before.role = m.role %}"
    + _USER
    + "{{ m.content | string }}{% endif %}",
}


@dataclass(frozen=True)
class Picture:
    """An image of a request, at its field."""

    where: str


def prompt(how: str, messages: list[dict[str, Any]]) -> str:
    loop = "{% set before = namespace(role='') %}{% for m in messages %}{{ '[' + m.role + ']' }}" + how
    template = (_SHOW if "show(" in how else "") + loop + "{% endfor %}"
    write = lambda form: render(template, with_parts(form, template, "<image>"))  # noqa: E731
    return rendered(messages, lambda form: with_result_images(form, write, "<image>"))


def message(at: int, role: str, *parts: str | Picture) -> dict[str, Any]:
    texts = [part for part in parts if isinstance(part, str)]
    made: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    return made if len(texts) == len(parts) else {**made, PARTS: list(parts)}


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rounds of words, an answer and results, with images among words and results; an answer follows results."""
    found: list[dict[str, Any]] = []

    def parts() -> list[str | Picture]:
        kinds = draw(st.lists(st.booleans(), min_size=1, max_size=3))
        return [Picture(f"messages.{len(found)}") if kind else f"t{len(found)}.{i}" for i, kind in enumerate(kinds)]

    for _ in range(draw(st.integers(1, 3))):
        if not found or (found[-1]["role"] == "assistant" and draw(st.booleans())):
            found.append(message(len(found), "user", *parts()))
        found.append(message(len(found), "assistant", f"a{len(found)}"))
        for _ in range(draw(st.integers(0, 2))):
            found.append(message(len(found), "tool", *parts()))
    return found


@pytest.mark.parametrize("how", TEMPLATES)
@given(messages=conversations())
def test_no_image_and_no_text_is_lost(how, messages):
    text = prompt(TEMPLATES[how], messages)
    parts = [part for m in messages for part in m.get(PARTS, [m["content"]])]
    assert text.count("<image>") == sum(isinstance(part, Picture) for part in parts)
    places = [text.index(part) for part in parts if isinstance(part, str)]
    assert places == sorted(places)


ASKED = [message(0, "user", "Look."), message(1, "assistant", "I do.")]
RESULT = message(2, "tool", "a cat", Picture("messages.2.content.1"))


@pytest.mark.parametrize(
    ("how", "shown"),
    [
        ("shows them", "[tool]a cat<image>"),
        ("knows texts alone", "[tool]a cat\n<image>"),
        ("drops them", "[tool]a cat[user]<tool_response><image></tool_response>"),
        ("refuses another turn", "[tool]a cat\n<image>"),
    ],
)
def test_the_place_of_an_image(how, shown):
    assert prompt(TEMPLATES[how], [*ASKED, RESULT]) == f"[user]Look.[assistant]I do.{shown}"


def test_the_user_s_next_words_follow_in_the_same_turn():
    said = message(3, "user", "And this?", Picture("messages.3.content.1"))
    text = prompt(TEMPLATES["drops them"], [*ASKED, RESULT, said])
    assert text.endswith("[tool]a cat[user]<tool_response><image></tool_response>And this?<image>")


def test_a_template_that_shows_no_image_is_named_by_the_field():
    with pytest.raises(FieldError, match=r"messages\.2\.content\.1 is an image in a tool's result") as refused:
        prompt("{{ m.role }}", [*ASKED, RESULT])
    assert refused.value.param == "messages.2.content.1"
    with pytest.raises(ChatTemplateError, match="no results"):
        prompt("{{ raise_exception('no results') if m.role == 'tool' }}", [*ASKED, RESULT])


def test_results_that_become_the_user_s_keep_their_images():
    (*_, told) = with_results_as_text([*ASKED, RESULT])
    assert told["content"] == "<tool_response>\na cat\n</tool_response>"
    assert prompt(TEMPLATES["shows them"], [told]) == "[user]<tool_response>a cat<image></tool_response>"


def test_instructions_that_join_the_user_s_turn_keep_its_images():
    """For a template that takes them at the beginning alone."""
    first = "{{ raise_exception('instructions come first') if m.role == 'system' and not loop.first }}"
    user = message(1, "user", "Look.", Picture("messages.1.content.1"))
    told = message(2, "system", "Be brief.")
    seen = partial(prompt, first + TEMPLATES["shows them"])
    reminder = "<system-reminder>\nBe brief.\n</system-reminder>"
    assert seen([*ASKED, told, user]).endswith(f"[user]{reminder}Look.<image>")
    assert seen([ASKED[0], ASKED[1], user, told]).endswith(f"[user]Look.<image>{reminder}")
