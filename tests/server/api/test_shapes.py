"""llama.cpp's DRY, XTC and top-n-sigma in the dialects that have their names."""

from __future__ import annotations

import pytest

LOOP = {"prompt": "a b c a b c a b c a b", "max_tokens": 30, "temperature": 0, "ignore_eos": True}


def text_of(server, **more) -> str:
    answer = server.post("/v1/completions", {**LOOP, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_dry_ends_loops_and_breakers_let_them_be(shared_server):
    plain = text_of(shared_server)
    dry = {"dry_multiplier": 50.0, "dry_allowed_length": 1, "dry_sequence_breakers": []}
    assert text_of(shared_server, **dry) == text_of(shared_server, **dry)
    changed = text_of(shared_server, **dry, prompt=LOOP["prompt"] + plain)
    assert changed != text_of(shared_server, prompt=LOOP["prompt"] + plain), "what was said is not said again"
    every = {**dry, "dry_sequence_breakers": [chr(code) for code in range(32, 96)]}
    assert text_of(shared_server, **{**every, "dry_penalty_last_n": 0}) == plain
    assert text_of(shared_server, dry_base=3.0, dry_sequence_breakers=["x"]) == plain, "the multiplier turns it on"


def test_xtc_and_sigma_draw_the_same_for_the_same_seed(shared_server):
    drawn = {"temperature": 1.0, "seed": 5}
    plain = text_of(shared_server, **drawn)
    for more in ({"xtc_probability": 1.0, "xtc_threshold": 0.002}, {"top_n_sigma": 0.5}):
        first = text_of(shared_server, **drawn, **more)
        assert first == text_of(shared_server, **drawn, **more) and first != plain
    assert text_of(shared_server, **drawn, xtc_probability=1.0, xtc_threshold=0.6) == plain


def test_chats_ollama_and_infill_take_them(shared_server, infilling):
    fields = {"dry_multiplier": 0.8, "xtc_probability": 0.5, "top_n_sigma": 2.0, "dry_sequence_breakers": ["\n", "ab"]}
    options = {"prompt": "x", "stream": False, "options": {**fields, "num_predict": 5, "seed": 1}}
    assert shared_server.post("/api/generate", {"model": "tiny", **options}).status_code == 200
    infill = {"input_prefix": "x", "input_suffix": "y", "n_predict": 5, **fields}
    assert infilling.post("/infill", infill).status_code == 200
    said = [{"role": "user", "content": "a b c a b c a b c"}]
    chat = {"messages": said, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    looped = {**fields, "dry_multiplier": 50.0, "dry_allowed_length": 1, "dry_sequence_breakers": []}
    plain, shaped = (shared_server.post("/v1/chat/completions", {**chat, **more}) for more in ({}, looped))
    assert plain.status_code == shaped.status_code == 200
    said_plain, said_shaped = (answer.json()["choices"][0]["message"]["content"] for answer in (plain, shaped))
    assert said_plain != said_shaped


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dry_base": 0.5}, "dry_base"),
        ({"dry_multiplier": -1}, "dry_multiplier"),
        ({"xtc_probability": 2}, "xtc_probability"),
        ({"dry_sequence_breakers": "x"}, "dry_sequence_breakers"),
        ({"mirostat": 1}, "mirostat is not supported"),
        ({"typical_p": 0.5}, "typical_p is not supported"),
    ],
)
def test_what_they_cannot_be_is_refused_by_name(shared_server, given, says):
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    for path, body in (("/v1/completions", LOOP), ("/v1/chat/completions", chat)):
        answer = shared_server.post(path, {**body, **given})
        assert answer.status_code == 400 and says in answer.json()["error"]["message"]
