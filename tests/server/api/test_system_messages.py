"""Instructions anywhere in a conversation, for chat templates that take them at the beginning alone, or nowhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.chat.system_messages import rewritten

TURNS = "{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}"
# As the templates of Qwen3.5 and of Gemma 3 and Mistral do.
AT_THE_START = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% endif %}" + TURNS + "{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate')"
    " }}{% endif %}" + TURNS + "{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
)
MESSAGES = [
    {"role": "system", "content": "A"},
    {"role": "user", "content": "b"},
    {"role": "system", "content": "C"},
    {"role": "assistant", "content": "d"},
    {"role": "developer", "content": "E"},
    {"role": "user", "content": "f"},
]
C, E = (f"<system-reminder>\n{text}\n</system-reminder>" for text in "CE")
PROMPTS = {
    AT_THE_START: f"<|system|>A<|end|><|user|>b\n\n{C}<|end|><|assistant|>d<|end|><|user|>{E}\n\nf<|end|><|assistant|>",
    ALTERNATING: f"<|user|>A\n\nb\n\n{C}<|end|><|assistant|>d<|end|><|user|>{E}\n\nf<|end|><|assistant|>",
}


@pytest.fixture(scope="module", params=PROMPTS, ids=["at the start", "alternating"])
def strict(request, start, tmp_path_factory):
    """A server with such a template, and the prompt that MESSAGES become."""
    template = tmp_path_factory.mktemp("template") / "strict.jinja"
    template.write_text(request.param)
    flags = (
        "--load-format",
        "dummy",
        "--kv-cache-memory-bytes",
        "16MiB",
        "--served-model-name",
        "m",
        "--chat-template",
        str(template),
    )
    return start(*flags), PROMPTS[request.param]


def test_every_dialect_takes_instructions_in_the_middle(strict):
    server, prompt = strict
    tokens = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == prompt
    said = [{**message, "role": message["role"].replace("developer", "system")} for message in MESSAGES]
    counted = server.post("/v1/messages/count_tokens", {"model": "m", "system": "A", "messages": said[1:]})
    assert counted.json()["input_tokens"] == len(tokens)
    counted = server.post("/v1/responses/input_tokens", {"model": "m", "instructions": "A", "input": said[1:]})
    assert counted.json()["input_tokens"] == len(tokens)
    for path, limit in {
        "/v1/chat/completions": {"max_tokens": 2},
        "/api/chat": {"options": {"num_predict": 2}},
    }.items():
        answer = server.post(path, {"model": "m", "messages": said, "stream": False, **limit}).json()
        used = answer["usage"]["prompt_tokens"] if "usage" in answer else answer["prompt_eval_count"]
        assert used == len(tokens)


def test_other_refusals_of_a_template_are_reported_in_its_words(strict):
    server, prompt = strict
    two = [{"role": "assistant", "content": "x"}, *MESSAGES]
    answer = server.post("/v1/chat/completions", {"messages": two, "max_tokens": 2})
    if prompt == PROMPTS[AT_THE_START]:
        assert answer.status_code == 200
    else:
        assert answer.status_code == 400 and "must alternate" in answer.json()["error"]["message"]


MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
        "content": st.text("abc", min_size=1, max_size=3),
    }
)


@given(
    st.lists(MESSAGE, max_size=8).map(
        lambda found: [{**m, "content": f"{m['content']}{i}"} for i, m in enumerate(found)]
    )
)
def test_nothing_is_lost_or_moved(messages):
    """Texts keep their order, other roles stay, and only the first message of a form may instruct."""
    forms = list(rewritten(messages))
    systems = [i for i, m in enumerate(messages) if m["role"] in ("system", "developer")]
    assert bool(forms) == bool(systems) and len(forms) <= 2
    before = [dict(m) for m in messages]
    for form in forms:
        whole = "\0".join(m["content"] for m in form)
        places = [whole.index(m["content"]) for m in messages]
        assert places == sorted(places) and messages == before
        assert not any(m["role"] in ("system", "developer") for m in form[1:])
        kept = [m for m in form if m["role"] in ("assistant", "tool")]
        assert kept == [m for m in messages if m["role"] in ("assistant", "tool")]
    if forms:
        roles = [m["role"] for m in forms[-1]]
        assert "system" not in roles and "developer" not in roles
        given = [m["role"] for m in messages if m["role"] not in ("system", "developer")]
        if not any(a == b == "user" for a, b in pairwise(given)):
            assert not any(a == b == "user" for a, b in pairwise(roles)), "turns alternate"


BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=abc;"


@pytest.mark.parametrize("told", [f"{BILLING}\nA", f"A\n{BILLING}", f"{BILLING} A"])
def test_every_dialect_drops_the_billing_line_alone(strict, told):
    server, _ = strict
    user = {"role": "user", "content": "b"}
    count = server.post("/tokenize", {"messages": [{"role": "system", "content": "A"}, user]}).json()["count"]
    for system in (told, [{"type": "text", "text": BILLING}, {"type": "text", "text": told}]):
        chat = server.post("/tokenize", {"messages": [{"role": "system", "content": system}, user]})
        assert chat.json()["count"] == count
        counted = server.post("/v1/messages/count_tokens", {"model": "m", "system": system, "messages": [user]})
        assert counted.json()["input_tokens"] == count
    counted = server.post("/v1/responses/input_tokens", {"model": "m", "instructions": told, "input": "b"})
    assert counted.json()["input_tokens"] == count
    chat = {"model": "m", "messages": [{"role": "system", "content": told}, user], "stream": False}
    assert server.post("/api/chat", {**chat, "options": {"num_predict": 1}}).json()["prompt_eval_count"] == count
