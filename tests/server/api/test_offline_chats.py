"""`LLM.chat` reads messages as the server does: nulls, parts, calls, instructions, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo import LLM, SamplingParams

# All that reaches a template, which refuses instructions behind the first message.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% endif %}{{ m | tojson(sort_keys=true) }}{% endfor %}{{ '>' if add_generation_prompt }}"
)
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=abc;"
texts = st.sampled_from(["", "a", "é", BILLING, f"{BILLING}\nb", "</think>"])
parts = st.one_of(
    texts, texts.map(lambda text: {"type": "text", "text": text}), st.just({"type": "refusal", "refusal": "r"})
)
contents = st.one_of(st.none(), texts, st.lists(parts, max_size=2), st.just(3), st.just([{"type": "text"}]))
arguments = st.sampled_from([None, "", "{}", '{"a": 1}', '{"a": "cut', "no", "[1]", {"a": None}, 3])
calls = arguments.map(lambda given: {"id": "1", "type": "function", "function": {"name": "f", "arguments": given}})
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
    optional={
        "content": contents,
        "tool_calls": st.one_of(st.none(), st.lists(calls, max_size=2), st.just([{}])),
        "name": st.sampled_from([None, "n", 1]),
        "reasoning_content": st.sampled_from([None, "t"]),
        "refusal": st.sampled_from([None, "no"]),
    },
)


@pytest.fixture(scope="module")
def both(start, tiny_model):
    """A server, and an `LLM` of the same model and template."""
    server = start("--chat-template", TEMPLATE)
    return server, LLM(str(tiny_model), load_format="dummy", kv_cache_memory_bytes=16 << 20, chat_template=TEMPLATE)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chat=st.lists(messages, min_size=1, max_size=3))
def test_any_conversation_becomes_the_server_s_prompt_or_error(both: Any, chat: list[dict[str, Any]]) -> None:
    server, llm = both
    answer = server.post("/tokenize", {"messages": chat}).json()
    try:
        (output,) = llm.chat(chat, SamplingParams(max_tokens=1), use_tqdm=False)
    except ValueError as error:
        assert answer["error"]["message"] == str(error)
    else:
        assert answer["tokens"] == output.prompt_token_ids


def test_null_content_beside_calls_is_an_empty_text(both: Any) -> None:
    _, llm = both
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ '/' if '/' not in m.content }}{% endfor %}"
    (output,) = llm.chat(chat, SamplingParams(max_tokens=1), use_tqdm=False, chat_template=template)
    assert output.prompt == "<user>a/<assistant>/"
