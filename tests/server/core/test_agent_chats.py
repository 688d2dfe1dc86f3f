"""Agents' conversations, by a template that writes them as Qwen3.5's does: nearly all that is cached is hit."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from served_prompts import Server
from support.agent_chats import WORDS, tokenizer

from octavo.chat.messages import Conversation
from octavo.chat.options import ChatOptions
from octavo.chat.render import render

TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
CALL = "\n\n<tool_call>\n<function=read>\n<parameter=path>\n{path}\n</parameter>\n</function>\n</tool_call>"
AGENTS, TURNS, ROUNDS = 2, 4, 8


@dataclass(frozen=True)
class Asked:
    """A request, and what the model generates."""

    agent: int
    prompt: list[int]
    boundaries: list[int]
    answer: list[int]


@cache
def requests(**kwargs: bool) -> list[Asked]:
    """Of agents that take turns, round by round. Half of the calls are not written as they were generated."""
    rng, asked = random.Random(3), list[Asked]()

    def text(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(most // 8 + 1, most)))

    histories: list[list[dict[str, Any]]] = [
        [{"role": "system", "content": " ".join(WORDS * 40)}] for _ in range(AGENTS)
    ]
    for _ in range(TURNS):
        for history in histories:
            history.append({"role": "user", "content": text(60)})
        for _ in range(ROUNDS):
            for agent, history in enumerate(histories):
                conversation = Conversation([*history], [TOOL], chat_template_kwargs=kwargs)
                encode = tokenizer().encode
                found = render(
                    conversation, ChatOptions(preserve_reasoning="never"), tokenizer(), encode, str
                ).with_boundaries()
                thought, content, path = text(60), text(20), text(8)
                thinks = kwargs.get("enable_thinking", True)
                call = CALL.format(path=path)
                generated = (f"{thought}\n</think>\n\n" if thinks else "") + content + call + rng.choice(["", "\n"])
                asked.append(Asked(agent, found.ids, [*found.boundaries], encode(generated + "<|im_end|>")))
                function = {"name": "read", "arguments": {"path": path}}
                reasoning = {"reasoning_content": thought} if thinks else {}
                calls = [{"id": "1", "type": "function", "function": function}]
                history.append({"role": "assistant", "content": content, "tool_calls": calls, **reasoning})
                history.append({"role": "tool", "tool_call_id": "1", "content": text(300)})
    return asked


@pytest.mark.parametrize(
    "kwargs", [{}, {"preserve_thinking": True}, {"enable_thinking": False}], ids=["drops", "keeps", "thinks not"]
)
@pytest.mark.parametrize(("pool", "least"), [(2.0, 0.95), (1.2, 0.9)])
def test_agents_hit_nearly_all_that_is_cached(kwargs: dict[str, bool], pool: float, least: float) -> None:
    """In a pool of so many times the keys and values of all conversations at their ends."""
    asked = requests(**kwargs)
    longest = {one.agent: len(one.prompt) + len(one.answer) for one in asked}
    server, seen = Server(int(pool * sum(longest.values()) / 16)), set[int]()
    prompt_tokens = hits = 0
    for one in asked:
        hit = server.serve(one.prompt, one.answer, one.boundaries)
        if one.agent in seen:
            prompt_tokens, hits = prompt_tokens + len(one.prompt), hits + hit
        seen.add(one.agent)
    assert server.hits >= least * server.found, (server.hits, server.found, server.prompt_tokens)
    if pool == 2.0 and "preserve_thinking" in kwargs:
        assert hits >= 0.95 * prompt_tokens
