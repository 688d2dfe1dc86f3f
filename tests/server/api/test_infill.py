"""Infilling over HTTP: OpenAI's and Ollama's suffix, and llama.cpp's /infill as editors' plugins send it, answered by a
model that recites what belongs between the two texts."""

from __future__ import annotations

import json

import httpx
import ollama
import openai
import pytest
from support.reciting import Recital, small_tokenizer, write_reciting_model

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
PREFIX, SUFFIX = "def total(items):\n    result = 0\n", "\n    return result of total\n"
MIDDLE = "    for item in items:\n        result += item.price * item.count"
LONG_SUFFIX = "\n    return what takes very long to say\n"
LONG = "\n".join(f"    line {number} of {number * number % 9973} and {number * 7919 % 99991}" for number in range(400))
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|fim_middle|>{% endif %}"
OTHER = "class Item:\n    price: int\n    count: int\n"


@pytest.fixture(scope="module")
def coder(start, tmp_path_factory):
    """A server of a model for code."""
    folder = tmp_path_factory.mktemp("coder") / "model"
    scripts = {SUFFIX: MIDDLE, LONG_SUFFIX: LONG}
    texts = [PREFIX, *scripts, *scripts.values(), OTHER]
    backend = small_tokenizer(texts, [*MARKS, "<|end|>"])
    write_reciting_model(folder, backend, Recital(scripts, TEMPLATE, "<|end|>"))
    flags = ["--max-model-len", "8192", "--kv-cache-memory-bytes", "256MiB"]
    return start("--served-model-name", "coder", *flags, model=folder)


@pytest.fixture(scope="module")
def client(coder):
    return openai.OpenAI(base_url=f"{coder.url}/v1", api_key="none", max_retries=0)


ASKED = {"model": "coder", "prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 200, "temperature": 0}


def test_a_completion_comes_between_prompt_and_suffix(client):
    whole = client.completions.create(**ASKED)
    assert whole.choices[0].text == MIDDLE and whole.choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**ASKED, stream=True)) == MIDDLE
    several = client.completions.create(**{**ASKED, "prompt": [PREFIX, "x"]})
    assert [choice.text for choice in several.choices] == [MIDDLE, MIDDLE]


def test_a_prompt_of_token_ids_is_a_prefix_as_well(coder, client):
    ids = coder.post("/tokenize", {"model": "coder", "prompt": PREFIX, "add_special_tokens": False}).json()["tokens"]
    by_ids = client.completions.create(**{**ASKED, "prompt": ids})
    assert by_ids.choices[0].text == MIDDLE
    assert by_ids.usage.prompt_tokens == client.completions.create(**ASKED).usage.prompt_tokens


def test_a_prompt_that_is_too_long_loses_its_head_where_that_is_asked(client):
    cut = client.completions.create(**{**ASKED, "prompt": PREFIX * 50}, extra_body={"truncate_prompt_tokens": 100})
    assert cut.choices[0].text == MIDDLE and cut.usage.prompt_tokens == 100


@pytest.mark.parametrize(("more", "field"), [({"echo": True}, "echo"), ({}, "suffix")])
def test_what_cannot_be_is_refused_by_name(client, shared_server, more, field):
    asked = client if more else shared_server.client()
    model = "coder" if more else "tiny"
    with pytest.raises(openai.BadRequestError, match=rf"(?s){field}.*drop {field}") as refused:
        asked.completions.create(**{**ASKED, "model": model}, **more)
    assert refused.value.param == field


def test_an_empty_suffix_is_none(shared_server):
    options = {"model": "tiny", "prompt": "a", "max_tokens": 4, "temperature": 0}
    plain, empty = (shared_server.client().completions.create(**options, suffix=suffix) for suffix in (None, ""))
    assert plain.choices[0].text == empty.choices[0].text


def test_ollamas_suffix(coder):
    asked = ollama.Client(host=coder.url)
    options = {"temperature": 0, "num_predict": 200}
    assert asked.generate("coder", PREFIX, suffix=SUFFIX, options=options).response == MIDDLE
    lines = asked.generate("coder", PREFIX, suffix=SUFFIX, options=options, stream=True)
    assert "".join(line.response for line in lines) == MIDDLE
    assert "insert" in (asked.show("coder").capabilities or []), "by which plugins know"
    with pytest.raises(ollama.ResponseError, match="system needs a chat template"):
        asked.generate("coder", PREFIX, suffix=SUFFIX, system="Be brief.")


# What Continue sends: with its own template for a model by the name of Qwen2.5-Coder's, and as providers with a suffix.
CONTINUE = {"model": "coder", "max_tokens": 256, "temperature": 0.01, "stream": True}
OWN_TEMPLATE = {
    **CONTINUE,
    "prompt": f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>",
    "stop": [
        *("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>"),
        *("<|file_sep|>", "<|im_start|>", "<|im_end|>", "/src/", "#- coding: utf-8", "```", "\ndef", "\nclass"),
    ],
}
WITH_SUFFIX = {**CONTINUE, "prompt": PREFIX, "suffix": SUFFIX, "top_p": 1, "presence_penalty": 0, "stop": ["\ndef"]}


@pytest.mark.parametrize("body", [OWN_TEMPLATE, WITH_SUFFIX], ids=["template", "suffix"])
def test_continues_request(coder, body):
    """Both ways have the same prompt, token by token."""
    with httpx.stream("POST", f"{coder.url}/v1/completions", json=body, timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert response.status_code == 200 and lines.pop() == "[DONE]"
    chunks = [json.loads(line)["choices"][0] for line in lines]
    assert "".join(chunk["text"] for chunk in chunks) == MIDDLE and chunks[-1]["finish_reason"] == "stop"
    ids = [
        coder.post("/v1/completions", {**one, "stream": False, "return_token_ids": True}).json()["choices"][0]
        for one in (OWN_TEMPLATE, WITH_SUFFIX)
    ]
    assert ids[0]["prompt_token_ids"] == ids[1]["prompt_token_ids"]


# What a plugin for editors sends: fields of every kind, of which some mean nothing here.
EDITOR = {
    "id_slot": 0,
    "input_prefix": PREFIX,
    "input_suffix": SUFFIX,
    "input_extra": [{"text": OTHER, "filename": "items.py", "time": 12345}],
    "prompt": "",
    "n_predict": 128,
    "stop": [],
    "n_indent": 0,
    "top_k": 40,
    "top_p": 0.9,
    "temperature": 0,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 60_000,
}


def infill(server, **fields: object) -> dict:
    answer = httpx.post(f"{server.url}/infill", json={**EDITOR, **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_an_editors_request(coder):
    answer = infill(coder)
    assert answer["content"] == MIDDLE and answer["stop"] and answer["stop_type"] == "eos"
    assert answer["has_new_line"] and answer["model"] == "coder"
    times = answer["timings"]
    assert times["prompt_n"] + times["cache_n"] == answer["tokens_evaluated"]
    assert times["predicted_n"] == answer["tokens_predicted"] > 0 and times["predicted_ms"] > 0


def test_the_line_that_goes_on_stands_behind_the_prefix(coder):
    first, line = PREFIX.splitlines(keepends=True)
    parted, whole = infill(coder, input_prefix=first, prompt=line), infill(coder)
    assert parted["content"] == MIDDLE
    assert parted["tokens_evaluated"] - whole["tokens_evaluated"] in (0, 1), "cut at its beginning, and all there"


def test_a_stream_adds_up_to_the_whole_answer(coder):
    with httpx.stream("POST", f"{coder.url}/infill", json={**EDITOR, "stream": True}, timeout=60) as response:
        pieces = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
    assert "".join(piece["content"] for piece in pieces) == MIDDLE
    assert [piece["stop"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1]["tokens_predicted"] == infill(coder)["tokens_predicted"]


def test_only_the_fields_that_are_asked_for(coder):
    wanted = ["content", "timings/prompt_n", "no/such/field"]
    answer = infill(coder, response_fields=wanted)
    assert set(answer) == {"content", "timings/prompt_n"} and answer["content"] == MIDDLE


def test_other_files_can_be_read_ahead(coder):
    """n_predict 0 generates nothing, and the next request finds the files in the cache."""
    files = [{"text": OTHER * 20, "filename": "long.py"}]
    warmed = infill(coder, input_extra=files, input_prefix="", input_suffix="", n_predict=0)
    assert warmed["content"] == "" and warmed["tokens_predicted"] == 0
    then = infill(coder, input_extra=files)
    assert then["content"] == MIDDLE
    assert then["timings"]["cache_n"] > 0.8 * warmed["tokens_evaluated"]


def test_an_answer_ends_with_its_time(coder):
    whole = infill(coder, input_suffix=LONG_SUFFIX, n_predict=-1, t_max_predict_ms=0)
    assert whole["content"] == LONG
    cut = infill(coder, input_suffix=LONG_SUFFIX, n_predict=-1, t_max_predict_ms=50)
    assert cut["stop_type"] == "limit" and "\n" in cut["content"] and LONG.startswith(cut["content"])
    assert cut["tokens_predicted"] < whole["tokens_predicted"] / 2
    assert cut["timings"]["predicted_ms"] < whole["timings"]["predicted_ms"] / 2


def test_what_does_not_fit_loses_its_oldest_files(coder):
    files = [{"text": f"# {number}\n" + OTHER * 30, "filename": f"{number}.py"} for number in range(40)]
    answer = infill(coder, input_extra=files)
    assert answer["content"] == MIDDLE and 6_000 < answer["tokens_evaluated"] <= 8192 - 128


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"grammar": "root ::= x"}, "grammar"), ({"mirostat": 2}, "mirostat"), ({"input_extra": [{}]}, "input_extra")],
)
def test_what_is_not_supported_is_named(coder, fields, named):
    answer = httpx.post(f"{coder.url}/infill", json={**EDITOR, **fields})
    assert answer.status_code == 400 and named in answer.json()["error"]["message"]


def test_a_model_without_marks_says_so(shared_server):
    answer = shared_server.post("/infill", EDITOR)
    assert answer.status_code == 400 and "no tokens for infilling" in answer.json()["error"]["message"]
