"""/v1/completions, as OpenAI's own client and vLLM's users see it."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def client(shared_server):
    return shared_server.client()


@pytest.fixture(scope="module")
def backend(tiny_model):
    return tokenizers.Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


def ids_of(response) -> list[int]:
    return response.choices[0].token_ids


def test_an_answer_and_its_usage(client, backend):
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=9, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.object == "text_completion" and answer.model == "tiny" and answer.id.startswith("cmpl-")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(backend.encode(PROMPT).ids)
    assert answer.usage.completion_tokens == 9
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 9
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_cached_tokens_are_counted(client):
    prompt = "A prompt that nothing else in these tests begins with: " + PROMPT * 5
    first, second = (client.completions.create(model="tiny", prompt=prompt, max_tokens=2) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens - 1


def test_the_default_is_sixteen_tokens(client):
    answer = client.completions.create(model="tiny", prompt=PROMPT, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("stop", [None, ["o", "e"]])
def test_streamed_pieces_add_up_to_the_whole_answer(client, stop):
    options = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 40,
        "temperature": 0,
        "stop": stop,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**options)
    chunks = list(raw_chunks(client, **options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == whole.choices[0].text
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-1] == whole.choices[0].finish_reason
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks[:-2])
    assert all(c["usage"] is None for c in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole.usage.completion_tokens


def raw_chunks(client, **body):
    """The data of a stream as it is: OpenAI's strict types do not know its own null finish_reason."""
    extra = body.pop("extra_body", {})
    with httpx.stream("POST", f"{client.base_url}completions", json={**body, **extra}, timeout=90) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_streamed_token_ids_and_usage_of_every_chunk(client):
    chunks = raw_chunks(
        client,
        model="tiny",
        prompt=PROMPT,
        max_tokens=6,
        temperature=0,
        ignore_eos=True,
        stream=True,
        return_token_ids=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    assert sum(len(c["choices"][0]["token_ids"]) for c in chunks[:-1]) == 6
    assert chunks[0]["choices"][0]["prompt_token_ids"]
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts) and counts[-1] == 6


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_usage_comes_as_asked(shared_server, path):
    """On the last chunk with include_usage; on all of them only with both options; no token before the first one."""
    body = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "stream": True, "seed": 1}
    body |= {"prompt": PROMPT} if path == "completions" else {"messages": [{"role": "user", "content": PROMPT}]}

    def counts(**options: bool) -> list[int | None]:
        text = shared_server.post(f"/v1/{path}", {**body, "stream_options": options}).text
        chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
        return [usage["completion_tokens"] if (usage := chunk.get("usage")) else None for chunk in chunks]

    assert set(counts()) == {None} == set(counts(continuous_usage_stats=True))
    *before, last = counts(include_usage=True)
    assert set(before) == {None} and last == 5
    running = counts(include_usage=True, continuous_usage_stats=True)
    assert running == sorted(running, key=lambda count: count or 0) and running[-2:] == [5, 5]
    # A chunk has all tokens that have come since the one before, of which the first may be several.
    assert running[0] >= 1 if path == "completions" else running[0] == 0, "the chunk with the role counts no token"


def test_text_ids_and_batches_of_both_are_prompts(client, backend):
    ids = backend.encode(PROMPT).ids
    options = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    single = client.completions.create(prompt=PROMPT, **options)
    assert client.completions.create(prompt=ids, **options).choices[0].text == single.choices[0].text
    for batch in ([PROMPT, "Hello", PROMPT], [ids, [1, 2, 3], ids]):
        answer = client.completions.create(prompt=batch, **options)
        assert [c.index for c in answer.choices] == [0, 1, 2]
        assert answer.choices[0].text == answer.choices[2].text == single.choices[0].text
        assert answer.usage.prompt_tokens > 2 * len(ids)


def test_n_answers_to_each_prompt(client):
    answer = client.completions.create(model="tiny", prompt=[PROMPT, "Hello"], n=3, seed=5, max_tokens=6, temperature=1)
    assert [c.index for c in answer.choices] == list(range(6))
    assert len({c.text for c in answer.choices[:3]}) > 1
    again = client.completions.create(model="tiny", prompt=[PROMPT, "Hello"], n=3, seed=5, max_tokens=6, temperature=1)
    assert [c.text for c in again.choices] == [c.text for c in answer.choices]


def test_a_stream_of_several_prompts_and_samples(client):
    options = {"model": "tiny", "prompt": [PROMPT, "Hello"], "n": 2, "seed": 5, "max_tokens": 12, "temperature": 1}
    whole = client.completions.create(**options)
    texts: dict[int, str] = {}
    for chunk in raw_chunks(client, **options, stream=True):
        choice = chunk["choices"][0]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {c.index: c.text for c in whole.choices}


def test_stop_strings_and_their_reason(client):
    free = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=60, temperature=0, extra_body={"ignore_eos": True}
    )
    text = free.choices[0].text
    stop = text[10:13]
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=60, temperature=0, stop=stop, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].stop_reason == stop
    included = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=60,
        temperature=0,
        stop=[stop],
        extra_body={"ignore_eos": True, "include_stop_str_in_output": True},
    )
    assert included.choices[0].text == text[: text.index(stop) + len(stop)]


def test_stop_token_ids(client):
    body = {"ignore_eos": True, "return_token_ids": True}
    free = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=30, temperature=0, extra_body=body)
    ids = free.choices[0].token_ids
    stop = ids[12]
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=30, temperature=0, extra_body={**body, "stop_token_ids": [stop]}
    )
    assert answer.choices[0].token_ids == ids[: ids.index(stop) + 1]
    assert answer.choices[0].stop_reason == stop


def test_logprobs_in_completions_shape(client, backend):
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=5, temperature=0, logprobs=3, extra_body={"return_token_ids": True}
    )
    choice = answer.choices[0]
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == len(choice.token_ids)
    for token_logprob, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert token_logprob == pytest.approx(max(top.values())), "greedy takes the best"
        assert token_logprob <= 0
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset[1] == len(logprobs.tokens[0])


def test_the_sampled_token_is_the_first_of_the_best(shared_server):
    """Whatever its rank, and the others follow by theirs: clients of vLLM read the first one."""
    body = {
        "prompt": PROMPT,
        "max_tokens": 3,
        "temperature": 0,
        "logprobs": 2,
        "echo": True,
        "allowed_token_ids": [7],
        "return_tokens_as_token_ids": True,
    }
    logprobs = shared_server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][-3:] == ["token_id:7"] * 3
    rows = list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))
    assert len(rows) > 4
    for token, logprob, top in rows[1:]:
        assert next(iter(top.items())) == (token, logprob)
        others = list(top.values())[1:]
        assert others == sorted(others, reverse=True) and len(top) in (2, 3)


def test_tokens_as_ids(client):
    answer = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=4,
        temperature=0,
        logprobs=1,
        extra_body={"return_token_ids": True, "return_tokens_as_token_ids": True},
    )
    assert answer.choices[0].logprobs.tokens == [f"token_id:{i}" for i in answer.choices[0].token_ids]


def test_echo_gives_the_prompt_back_with_its_logprobs(shared_server, backend):
    """The first token has no log-probability; OpenAI's null there is more than its client's strict types allow."""
    ids = backend.encode(PROMPT).ids
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 1}
    answer = shared_server.post("/v1/completions", body).json()
    choice = answer["choices"][0]
    assert choice["text"].startswith(PROMPT)
    assert len(choice["logprobs"]["tokens"]) == len(ids) + answer["usage"]["completion_tokens"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert "".join(choice["logprobs"]["tokens"][: len(ids)]) == PROMPT


def test_every_choice_of_a_stream_echoes_all_of_a_prompt_that_takes_several_steps(shared_server):
    """The log-probabilities of its parts come one step after the other."""
    ids = [i % 200 for i in range(240)]
    body = {
        "prompt": ids,
        "max_tokens": 3,
        "temperature": 0,
        "echo": True,
        "logprobs": 1,
        "n": 2,
        "stream": True,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
    }
    tokens: dict[int, list[str]] = {0: [], 1: []}
    for line in shared_server.post("/v1/completions", body).text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                tokens[choice["index"]] += choice["logprobs"]["tokens"]
                assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["tokens"])
    for said in tokens.values():
        assert said[:240] == [f"token_id:{i}" for i in ids] and len(said) == 243


@given(
    ids=st.lists(st.one_of(st.integers(0, 399), st.integers(335, 345)), min_size=1, max_size=12),
    as_text=st.booleans(),
    skip=st.booleans(),
    options=st.sampled_from([{}, {"allowed_token_ids": [341, 342, 70]}, {"truncate_prompt_tokens": 3}]),
)
@settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
def test_offsets_point_at_their_tokens_in_the_text(shared_server, backend, ids, as_text, skip, options):
    """Whatever the prompt and the answer hold: special tokens, which the text may show or not, and parts of
    characters."""
    prompt = backend.decode(ids, skip_special_tokens=False) if as_text else ids
    if not prompt:
        return
    body = {
        "prompt": prompt,
        "max_tokens": 4,
        "echo": True,
        "logprobs": 0,
        "seed": 1,
        "ignore_eos": True,
        "skip_special_tokens": skip,
        "return_token_ids": True,
        **options,
    }
    choice = shared_server.post("/v1/completions", body).json()["choices"][0]
    text, logprobs = choice["text"], choice["logprobs"]
    lines = shared_server.post("/v1/completions", {**body, "stream": True}).text.splitlines()
    pieces = [json.loads(line[6:])["choices"][0]["logprobs"] for line in lines if line.startswith("data: {")]
    assert [at for piece in pieces if piece for at in piece["text_offset"]] == logprobs["text_offset"]
    tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
    num_prompt, special = len(choice["prompt_token_ids"]), range(backend.token_to_id("<|end|>"), 400)
    assert len(tokens) == len(offsets) == num_prompt + 4
    shown = choice["prompt_token_ids"] + [None if skip and i in special else i for i in choice["token_ids"]]
    for i, (token, start, end) in enumerate(zip(tokens, offsets, [*offsets[1:], len(text)], strict=True)):
        assert 0 <= start <= end <= len(text)
        if "\ufffd" not in "".join(tokens[max(i - 1, 0) : i + 2]):
            assert text[start:end] == ("" if shown[i] is None else token), (i, token)
    # logprobs 0 is the sampled token alone.
    expected = [None if x is None else {t: x} for t, x in zip(tokens, logprobs["token_logprobs"], strict=True)]
    assert logprobs["top_logprobs"] == expected


def test_the_prompt_alone_can_be_scored(shared_server, backend):
    """What evaluation harnesses send: echo with max_tokens 0."""
    answer = shared_server.post(
        "/v1/completions", {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
    ).json()
    assert answer["choices"][0]["text"] == PROMPT
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(backend.encode(PROMPT).ids)
    assert answer["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_in_vllms_shape(client, backend):
    ids = backend.encode(PROMPT).ids
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1, extra_body={"prompt_logprobs": 2})
    positions = answer.choices[0].prompt_logprobs
    assert positions[0] is None and len(positions) == len(ids)
    for token_id, position in zip(ids[1:], positions[1:], strict=True):
        assert position[str(token_id)]["logprob"] <= 0
        assert {"logprob", "rank", "decoded_token"} <= position[str(token_id)].keys()


def test_a_stream_tells_prompt_logprobs_though_its_first_text_is_held_back(client, backend):
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**options, extra_body={"prompt_logprobs": 0})
    stop = whole.choices[0].text[:3] + "\x01"  # begins as the answer does, and never matches
    chunks = raw_chunks(client, **options, stop=[stop], stream=True, prompt_logprobs=0)
    told = [c["prompt_logprobs"] for chunk in chunks for c in chunk["choices"] if "prompt_logprobs" in c]
    assert told == [whole.choices[0].prompt_logprobs]


def test_echoed_prompts_are_the_ones_that_were_computed(client, backend):
    kept = backend.decode(backend.encode(PROMPT).ids[-3:])
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1, "echo": True, "temperature": 0}
    answer = client.completions.create(**options, extra_body={"truncate_prompt_tokens": 3})
    assert answer.choices[0].text.startswith(kept) and answer.usage.prompt_tokens == 3
    assert len(answer.choices[0].text) < len(PROMPT) + 3


def test_sampling_fields_reach_the_sampler(client):
    """Each of these forces the outcome; none of them could pass by chance."""
    only = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=6, extra_body={"allowed_token_ids": [70], "return_token_ids": True}
    )
    assert ids_of(only) == [70] * 6
    biased = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=6, logit_bias={"71": 100}, extra_body={"return_token_ids": True}
    )
    assert ids_of(biased) == [71] * 6
    greedy = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0)
    for near_greedy in ({"top_k": 1}, {"min_p": 1.0}):
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=8, temperature=1, extra_body=near_greedy
        )
        assert answer.choices[0].text == greedy.choices[0].text
    nucleus = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=1, top_p=1e-9)
    assert nucleus.choices[0].text == greedy.choices[0].text


def test_min_tokens_holds_the_end_back(client, backend):
    end = backend.token_to_id("<|end|>")
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "logit_bias": {str(end): 100}}
    assert client.completions.create(**options).usage.completion_tokens == 1
    answer = client.completions.create(**options, extra_body={"min_tokens": 7})
    assert answer.usage.completion_tokens >= 7
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].stop_reason is None


def test_special_tokens_show_only_when_asked(client, backend):
    pad = backend.token_to_id("<|user|>")
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2}
    hidden = client.completions.create(**options, extra_body={"allowed_token_ids": [pad]})
    shown = client.completions.create(**options, extra_body={"allowed_token_ids": [pad], "skip_special_tokens": False})
    assert (hidden.choices[0].text, shown.choices[0].text) == ("", "<|user|><|user|>")


def test_truncate_prompt_tokens_keeps_the_end(client):
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=1, extra_body={"truncate_prompt_tokens": 3, "return_token_ids": True}
    )
    assert answer.usage.prompt_tokens == 3
    assert len(answer.choices[0].prompt_token_ids) == 3


def test_any_served_name_is_the_model(client):
    assert client.completions.create(model="also-tiny", prompt=PROMPT, max_tokens=1).model == "tiny"


def test_nulls_mean_defaults(shared_server):
    nulls = dict.fromkeys(
        ["temperature", "top_p", "n", "stop", "seed", "logprobs", "echo", "suffix", "max_tokens", "user"]
    )
    answer = shared_server.post("/v1/completions", {"model": None, "prompt": PROMPT, **nulls})
    assert answer.status_code == 200, answer.text


def test_unknown_fields_are_ignored_with_one_log_line(shared_server):
    for _ in range(3):
        body = {"prompt": PROMPT, "max_tokens": 1, "brand_new_field": 1, "user": "me", "metadata": {"a": "b"}}
        assert shared_server.post("/v1/completions", body).status_code == 200
    assert shared_server.log.count("brand_new_field") == 1


def test_many_at_once_answer_as_alone(shared_server):
    async def many() -> list[str]:
        client = shared_server.async_client()
        options = {"model": "tiny", "max_tokens": 12, "temperature": 0}
        answers = await asyncio.gather(
            *(client.completions.create(prompt=f"{PROMPT} {i % 8}", **options) for i in range(48))
        )
        return [answer.choices[0].text for answer in answers]

    texts = asyncio.run(many())
    assert texts[:8] * 6 == texts
