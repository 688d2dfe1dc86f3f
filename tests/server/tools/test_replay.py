"""Answers stand in the next turn's prompt token by token as they were spoken, however the client writes them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.agent_chats import FULL_TEMPLATE
from support.reciting import small_tokenizer
from tests.server.tools.test_harmony import TEMPLATE as HARMONY

from octavo.chat.messages import Conversation, check_messages
from octavo.chat.options import ChatOptions
from octavo.chat.render import Rendered, render
from octavo.chat.replay import Replay, Replayed, Spoken, SpokenAnswers
from octavo.interface.outputs import CompletionOutput
from octavo.text.tokenizer import Tokenizer

WORDS = ["a", "file", "of", "the", "test", "was", "found", "é", "日本", '"x"', "src/a.py", "1.5"]
LOOK = {"path": {"type": "string"}, "lines": {"type": "integer"}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": LOOK}}}]
ROLES = "{% for m in messages %}{% if m.role == 'tool' %}"
CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
ITEMS = "{% for k, v in f.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
TELL = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
GLM = (
    "[gMASK]<sop>{% set last = namespace(user=-1) %}{% for m in messages if m.role == 'user' %}"
    "{% set last.user = messages.index(m) %}{% endfor %}"
    + TELL
    + ROLES
    + "<|observation|><tool_response>{{ m.content }}</tool_response>"
    "{% elif m.role == 'assistant' %}<|assistant|>"
    "{% if (clear_thinking is defined and not clear_thinking) or loop.index0 > last.user %}"
    "<think>{{ (m.reasoning_content or '') | trim }}{% endif %}</think>{{ m.content | trim }}"
    + CALLS
    + "<tool_call>{{ f.name }}"
    + ITEMS
    + "<arg_key>{{ k }}</arg_key><arg_value>"
    + VALUE
    + "</arg_value>{% endfor %}</tool_call>{% endfor %}"
    "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
GEMMA = (
    "<bos>" + TELL + ROLES + "<|turn>user\n<|tool_response>response:look{{ m.content | tojson }}<tool_response|>"
    "<turn|>\n{% else %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.reasoning_content %}<|channel>thought\n{{ m.reasoning_content | trim }}<channel|>{% endif %}"
    "{{ m.content | trim }}" + CALLS + "<|tool_call>call:{{ f.name + '{' }}" + ITEMS + "{{ k }}:"
    "{% if v is string %}<|\"|>{{ v }}<|\"|>{% else %}{{ v | tojson }}{% endif %}{{ ',' if not loop.last }}"
    "{% endfor %}{{ '}' }}<tool_call|>{% endfor %}<turn|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
MISTRAL = (
    "<s>[AVAILABLE_TOOLS]" + TELL + "[/AVAILABLE_TOOLS]" + ROLES + "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}"
    "{{ m.content }}" + CALLS + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}</s>"
    "{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)

Arguments = dict[str, Any]
Say = Callable[[str, str, list[Arguments], Callable[..., str]], str]


def _params(made: list[Arguments], open_: str, key: str, value: str, close: str, between: str = "") -> str:
    written = [
        open_ + "".join(key % k + (v if isinstance(v, str) else json.dumps(v)) + value for k, v in one.items()) + close
        for one in made
    ]
    return between.join(written)


def say_qwen(thought: str, text: str, made: list[Arguments], space: Callable[..., str]) -> str:
    calls = _params(
        made,
        "<tool_call>\n<function=look>\n",
        "<parameter=%s>\n",
        "\n</parameter>\n",
        "</function>\n</tool_call>",
        "\n",
    )
    return f"{thought}\n</think>\n\n{space()}{text}{space()}" + (f"\n\n{calls}{space()}" if made else "") + "<|im_end|>"


def say_glm(thought: str, text: str, made: list[Arguments], space: Callable[..., str]) -> str:
    key, value = "<arg_key>%s</arg_key>" + space() + "<arg_value>", "</arg_value>" + space()
    calls = _params(made, "<tool_call>look", key, value, "</tool_call>")
    return f"{thought}</think>{space()}{text}{space()}{calls}" + ("<|observation|>" if made else "<|user|>")


def say_gemma(thought: str, text: str, made: list[Arguments], space: Callable[..., str]) -> str:
    quote = '<|"|>'
    values = [
        [f"{k}:{quote + v + quote if isinstance(v, str) else json.dumps(v)}" for k, v in one.items()] for one in made
    ]
    calls = "".join("<|tool_call>call:look{" + ",".join(one) + "}<tool_call|>" for one in values)
    return f"<|channel>thought\n{thought}{space()}<channel|>{text}{space()}{calls}<turn|>"


def say_mistral(thought: str, text: str, made: list[Arguments], space: Callable[..., str]) -> str:
    separators = (",", ":") if space("", " ") else (", ", ": ")
    written = [json.dumps(one, ensure_ascii=False, separators=separators) for one in made]
    calls = "".join(f"[TOOL_CALLS]look[ARGS]{space('', ' ')}{one}" for one in written)
    return f"[THINK]{thought}[/THINK]{space()}{text}{space()}{calls}</s>"


def say_harmony(thought: str, text: str, made: list[Arguments], space: Callable[..., str]) -> str:
    (one,) = made
    channel = space("commentary to=functions.look <|constrain|>json", "commentary to=functions.look json")
    given = json.dumps(one, ensure_ascii=False, separators=(",", space(":", ": ")))
    call = f"<|start|>assistant<|channel|>{channel}<|message|>{given}<|call|>"
    return f"<|channel|>analysis<|message|>{thought}<|end|>{call}"


@dataclass(frozen=True, eq=False)
class Family:
    template: str
    say: Say
    special: tuple[str, ...]
    marks: tuple[str, ...] = ()
    ends_turns: bool = True  # False: it calls a tool in every answer, once

    @cache  # noqa: B019 (there are five)
    def tokenizer(self) -> Tokenizer:
        backend = small_tokenizer(WORDS, self.special, self.marks)
        return Tokenizer(backend, {}, {"default": self.template})


HARMONY_MARKS = ("start", "end", "message", "channel", "constrain", "return", "call")
FAMILIES = {
    "qwen3.5": Family(
        FULL_TEMPLATE,
        say_qwen,
        ("<|im_start|>", "<|im_end|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ),
    "glm-4.7": Family(
        GLM, say_glm, ("<|user|>", "<|assistant|>", "<|observation|>", "<sop>"), ("<think>", "</think>", "<tool_call>")
    ),
    "gpt-oss": Family(HARMONY, say_harmony, tuple(f"<|{mark}|>" for mark in HARMONY_MARKS), ends_turns=False),
    "gemma 4": Family(
        GEMMA, say_gemma, ("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>')
    ),
    "mistral v13": Family(
        MISTRAL, say_mistral, ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")
    ),
}


class Talk:
    """A client with habits, and a model that spells as it likes."""

    def __init__(self, family: Family, seed: int, answers: SpokenAnswers | None = None) -> None:
        self.family, self.rng = family, random.Random(seed)
        self.tokenizer = family.tokenizer()
        decode = partial(self.tokenizer.decode, skip_special_tokens=False)
        spoken = SpokenAnswers() if answers is None else answers
        self.replay = Replay(spoken, "", self.tokenizer.special_text, decode)
        self.drops_thoughts, self.trims = self.rng.random() < 0.5, self.rng.random() < 0.8
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": self.text(40)}]

    def text(self, most: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=self.rng.randint(1, most)))

    def render(self) -> Rendered:
        conversation = Conversation(check_messages(self.messages), TOOLS)
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        return render(conversation, ChatOptions(), self.tokenizer, encode, str, replay=self.replay)

    def spelled(self, text: str) -> list[int]:
        """The text in tokens that a tokenizer would not choose."""
        special = sorted((*self.family.special, *self.family.marks), key=len, reverse=True)
        parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text)
        ids: list[int] = []
        for part in parts:
            while part:
                size = len(part) if part in special else self.rng.randint(1, 12)
                ids += self.tokenizer.encode(part[:size], add_special_tokens=False)
                part = part[size:]
        return ids

    def answer(self, rendered: Rendered) -> list[int]:
        """The tokens that the model says; the client sends them back in its own words, and goes on."""
        rng = self.rng
        space = lambda *choice: rng.choice(choice or ("", "", "\n", " "))  # noqa: E731
        is_call = not self.family.ends_turns or rng.random() < 0.7
        made = [{"path": self.text(3), "lines": rng.randint(0, 99)} for _ in range(is_call)]
        text = self.family.say(self.text(9), "" if not self.family.ends_turns else self.text(9), made, space)
        ids = self.spelled(text)
        end = self.tokenizer.special_text(ids[-1])
        assert end is not None
        shown = text if rendered.harmony else text.removesuffix(end)
        answer = rendered.new_parser().parse(CompletionOutput(0, shown, ids, finish_reason="stop"))
        assert [json.loads(call.arguments) for call in answer.calls] == made and answer.reasoning
        self.replay.remember(rendered.text or "", rendered.num_messages, answer, ids)
        content = answer.content.strip() if self.trims else answer.content
        said: dict[str, Any] = {"role": "assistant", "content": content}
        if not self.drops_thoughts:
            said["reasoning_content"] = answer.reasoning.strip() if self.trims else answer.reasoning
        if made:
            dumped = [json.dumps(one, sort_keys=rng.random() < 0.5) for one in made]
            functions = [{"name": "look", "arguments": one} for one in dumped]
            said["tool_calls"] = [
                {"id": f"c{at}", "type": "function", "function": function} for at, function in enumerate(functions)
            ]
        self.messages.append(said)
        self.messages += [{"role": "tool", "tool_call_id": "c0", "content": self.text(20)} for _ in made]
        if not made:
            self.messages.append({"role": "user", "content": self.text(20)})
        return ids


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("seed", range(4))
def test_each_turn_begins_with_all_that_was_computed(name: str, seed: int) -> None:
    talk = Talk(FAMILIES[name], seed)
    known: list[int] = []
    for turn in range(30):
        rendered = talk.render()
        assert rendered.ids[: len(known)] == known, f"turn {turn}"
        if name != "mistral v13":  # nothing follows the last message in its prompts
            last = max(rendered.find_boundaries())  # where a state of recurrent layers is kept
            assert len(known) - 1 <= last < len(rendered.ids)
        known = rendered.ids + talk.answer(rendered)


def test_without_memory_a_prompt_is_what_the_client_sent() -> None:
    talk = Talk(FAMILIES["qwen3.5"], 1, SpokenAnswers(most=0))
    for _ in range(5):
        rendered = talk.render()
        assert rendered.ids == talk.tokenizer.encode(rendered.text or "", add_special_tokens=False)
        talk.answer(rendered)


@pytest.mark.parametrize(
    "change",
    [
        {"content": "Something else."},
        {"reasoning_content": "Another thought."},
        {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"path": "b"}'}}]},
    ],
    ids=str,
)
def test_what_the_client_has_changed_is_not_what_was_spoken(change: dict[str, Any]) -> None:
    talk = Talk(FAMILIES["qwen3.5"], 2)
    for _ in range(6):
        talk.answer(talk.render())
    last = max(at for at, message in enumerate(talk.messages) if message["role"] == "assistant")
    talk.messages[last] |= change
    rendered = talk.render()
    assert rendered.replayed is not None and last not in rendered.replayed.found
    tail = talk.tokenizer.decode(rendered.ids, skip_special_tokens=False)[-3000:]
    assert all(word in tail for word in re.findall(r"\w+(?: \w+)+", str(change.get("content", ""))))


def test_other_scopes_and_earlier_prompts_find_nothing() -> None:
    talk = Talk(FAMILIES["glm-4.7"], 3)
    for _ in range(4):
        talk.answer(talk.render())
    whole = talk.render()
    assert whole.replayed is not None and len(whole.replayed.found) == 4
    talk.replay = Replay(talk.replay.answers, "other", talk.replay.end_of, talk.replay.decode)
    assert talk.render().replayed is None
    talk.replay = Replay(talk.replay.answers, "", talk.replay.end_of, talk.replay.decode)
    said = talk.messages[0]["content"]
    for other in (said + " and more", said[::-1]):  # of the same length, too
        talk.messages[0]["content"] = other
        changed = talk.render()
        assert changed.replayed is not None and not changed.replayed.found


def test_an_answer_whose_end_is_joined_with_what_follows_is_not_put_back() -> None:
    spoken = Spoken(b"", 1, "ab<end>", [7, 8, 9], "", "<end>")
    replayed = Replayed("?ab<end>!", [(1, 8, spoken)])
    assert replayed.ids({"?": [1], "<end>!": [9, 2]}.__getitem__) == [1, 7, 8, 9, 2]
    assert replayed.ids({"?": [1], "<end>!": [3]}.__getitem__) is None


@given(sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 900)), max_size=40))
@settings(max_examples=100, deadline=None, database=None)
def test_memory_is_bounded_and_forgets_the_oldest(sizes: list[tuple[int, int, int]]) -> None:
    answers, last = SpokenAnswers(most=6, most_bytes=6_000), None
    for key, prompt, size in sizes:
        last = bytes([key]), Spoken(bytes([prompt]), 1, "x" * size, [1], "", "</s>")
        answers.keep(*last)
        assert len(answers) <= 6 and answers._size <= 6_000
        assert answers._size == sum(2 * len(s.text) + 36 + 500 for s in answers._known.values())
        assert sorted(map(id, answers._known.values())) == sorted(
            id(s) for all_ in answers._alike.values() for s in all_
        )
        assert answers.find(last[0])[0] is last[1]
