"""Instructions lose the line that a client adds for its maker's billing, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import FieldError
from octavo.text.messages import read_message, read_messages, without_billing

BILLING = "x-anthropic-billing-header: cc_version=2.1.280.0d9; cc_entrypoint=cli; cch=fa690;"
lines = st.text(alphabet="ab \t;=:", max_size=8)


@given(before=st.lists(lines, max_size=3), after=st.lists(lines, max_size=3))
def test_the_billing_line_goes_wherever_it_stands_and_the_rest_stays(before: list[str], after: list[str]) -> None:
    text = "\n".join([*before, BILLING, *after])
    rest = "\n".join([*before, *after])
    assert without_billing([text]) == ([rest] if rest else [])


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"{BILLING}You are", ["You are"]),
        (f"{BILLING} You are", ["You are"]),
        (f"  {BILLING}\r\nA\r\n", ["A\r\n"]),
        (f"A\n{BILLING[:-1]}\n{BILLING}", ["A"]),
        ("x-anthropic-billing-header: a new form\nA", ["x-anthropic-billing-header: a new form\nA"]),
        (f"A\n{BILLING.replace('anthropic', 'ahthropic')}\nB", ["A\nB"]),
        (f"Never say {BILLING}", [f"Never say {BILLING}"]),
        ("", [""]),
    ],
)
def test_words_beside_the_billing_line_stay(text: str, left: list[str]) -> None:
    assert without_billing([text]) == left


@pytest.mark.parametrize("role", ["system", "developer"])
def test_parts_of_nothing_but_billing_are_left_out_of_instructions_alone(role: str) -> None:
    content = [{"type": "text", "text": BILLING}, {"type": "text", "text": "A"}]
    read = lambda message: read_message(message, "messages.0", lambda part, where: None)["content"]  # noqa: E731
    assert read({"role": role, "content": content}) == "A"
    assert read({"role": "user", "content": content}) == f"{BILLING}\nA"


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("content", [BILLING, [{"type": "text", "text": BILLING}] * 2])
def test_instructions_of_nothing_but_billing_are_no_message(role: str, content: Any) -> None:
    """An empty turn would be told to the model; the other messages keep their places in errors."""
    told = {"role": "user", "content": "A"}
    read = read_messages([{"role": role, "content": content}, told], lambda part, where: None)
    assert [message["content"] for message in read] == ["A"]
    empty = {"role": role, "content": ""}
    assert len(read_messages([empty, told], lambda part, where: None)) == 2, "as the client says"
    with pytest.raises(FieldError, match=r"messages\.1\.content"):
        read_messages([{"role": role, "content": content}, {"role": "user", "content": 1}], lambda *_: None)


def test_a_message_without_a_role_is_named() -> None:
    with pytest.raises(FieldError, match=r"messages\.0\.role must be a string, got null") as refused:
        read_message({"content": "a"}, "messages.0", lambda part, where: None)
    assert refused.value.param == "messages.0.role"


@pytest.mark.parametrize(
    "thoughts",
    [
        {"reasoning": "Hm."},
        {"reasoning_content": "Hm."},
        {"reasoning": "Hm.", "reasoning_content": None},
        {"reasoning": "", "reasoning_content": "Hm."},
    ],
)
def test_thoughts_are_read_under_either_name_and_templates_find_them_under_both(thoughts):
    message = {"role": "assistant", "content": "It is.", **thoughts}
    read = read_message(message, "messages.0", lambda part, where: None)
    assert read["reasoning"] == read["reasoning_content"] == "Hm."


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thoughts_that_are_no_text_are_refused_by_name(name):
    with pytest.raises(FieldError, match=f"messages.0.{name} must be a string"):
        read_message({"role": "assistant", "content": "", name: {"text": "Hm."}}, "messages.0", lambda *_: None)
    read_message({"role": "user", "content": "", name: {"text": "Hm."}}, "messages.0", lambda *_: None)
