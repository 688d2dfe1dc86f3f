"""Where prompts of chats surely begin alike: with a template that drops earlier turns' thoughts, as Qwen3.5's does."""

from __future__ import annotations

import random
from typing import Any

import pytest
from jinja2 import Environment

from octavo.chat.boundaries import beginnings, positions
from octavo.text.chat_template import ChatTemplateError

# Thoughts stay behind the user's last message, and an answer begins inside of them; there must be a user.
TEMPLATE = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == "user" -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
<|start|>{{ m.role }}
{% if m.role == "assistant" and loop.index0 > ns.last -%}<think>{{ m.thought }}</think>{% endif -%}
{{ m.content }}<|end|>
{% endfor -%}
{%- if opens -%}<|start|>assistant
<think>{% endif -%}
"""
OPENS = len("assistant<think>")  # tokens that open an answer, at most
SPECIAL = {"<|start|>": 1, "<|end|>": 2}


def render(messages: list[dict[str, Any]], opens: bool = False) -> str:
    if not any(message["role"] == "user" for message in messages):
        raise ChatTemplateError("no user")
    text: str = Environment().from_string(TEMPLATE).render(messages=messages, opens=opens)
    return text


def tokenize(text: str) -> list[int]:
    """Special tokens, and runs of text in pairs of letters: where one begins depends on what stands before."""
    ids: list[int] = []
    while text:
        token = next((name for name in SPECIAL if text.startswith(name)), None)
        size = len(token) if token else 2 if "<" not in text[:2] else 1
        ids.append(SPECIAL[token] if token else 3 + hash(text[:size]) % 100_000)
        text = text[size:]
    return ids


def conversation(rng: random.Random, turns: int) -> list[dict[str, Any]]:
    """Each turn's rounds call tools; the last one awaits an answer."""
    messages = [{"role": "system", "content": "Be brief." * rng.randint(1, 3)}]
    for _ in range(turns):
        messages.append({"role": "user", "content": "q" * rng.randint(1, 9)})
        for _ in range(rng.randint(0, 3)):
            messages.append({"role": "assistant", "content": "call", "thought": "t" * rng.randint(1, 9)})
            messages.append({"role": "tool", "content": "r" * rng.randint(1, 9)})
    return messages


@pytest.mark.parametrize("seed", range(10))
def test_what_follows_begins_with_one_of_them(seed: int) -> None:
    """The next round begins with all of the prompt but what opens the answer, the next turn with the prompt up to the
    user's last message, another conversation with what stands before the user's first one."""
    rng = random.Random(seed)
    messages = conversation(rng, rng.randint(1, 3))
    text = render(messages, opens=True)
    parts = beginnings(messages, text, render)
    ids = tokenize(text)
    found = positions(parts, ids, tokenize, frozenset(SPECIAL.values()))
    answer = {"role": "assistant", "content": "done", "thought": "other"}
    user = max(i for i, message in enumerate(messages) if message["role"] == "user")
    for follows in (
        [*messages, answer, {"role": "tool", "content": "x"}],
        [*messages, answer, {"role": "user", "content": "y"}],
        [messages[0], {"role": "user", "content": "z"}],
        [*messages[: user + 1], answer, {"role": "user", "content": "y"}],
    ):
        other = tokenize(render(follows, opens=True))
        common = next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), len(ids))
        assert any(common - OPENS <= position <= common for position in found), (common, found)
    assert len(found) <= 3 and found == sorted(found) and all(0 < position < len(ids) for position in found)


def test_a_last_token_counts_only_before_a_special_one() -> None:
    assert positions(["ab"], [*tokenize("ab"), 1, 7], tokenize, {1}) == [1]
    assert positions(["abcd"], [*tokenize("abcd"), 7, 7], tokenize, {1}) == [1]
    assert positions(["abcd"], [*tokenize("ab"), 7, 7], tokenize, {1}) == [1]
    assert positions(["abcd"], [7, 7], tokenize, {1}) == []


def test_a_template_that_refuses_a_part_gives_the_others() -> None:
    def refuses(messages: list[dict[str, Any]]) -> str:
        raise ChatTemplateError("no")

    assert beginnings([{"role": "user", "content": "q"}], "text", refuses) == []
