"""/tokenize and /detokenize, /version and the log lines."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import octavo


@pytest.fixture(scope="module")
def backend(tiny_model):
    return tokenizers.Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=50))
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_text_survives_the_way_to_ids_and_back(shared_server, text):
    tokens = shared_server.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert shared_server.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}


def test_tokenize(shared_server, backend):
    answer = shared_server.post("/tokenize", {"prompt": "The fox", "return_token_strs": True, "model": "tiny"}).json()
    expected = backend.encode("The fox")
    assert answer == {
        "count": len(expected.ids),
        "max_model_len": 1024,
        "tokens": expected.ids,
        "token_strs": expected.tokens,
    }
    assert shared_server.post("/tokenize", {"prompt": ""}).json()["count"] == 0


def test_tokenize_a_chat(shared_server, backend):
    messages = [{"role": "user", "content": "Hello"}]
    answer = shared_server.post("/tokenize", {"messages": messages}).json()
    assert answer["tokens"] == backend.encode("<|user|>Hello<|end|><|assistant|>").ids
    answer = shared_server.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert answer["tokens"] == backend.encode("<|user|>Hello<|end|>").ids


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "tools": []}, 400, "tools needs messages"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "other"),
        ("/tokenize", {"prompt": "x" * 3_000_000}, 400, "max_model_len"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [400]}, 400, "399"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "-1"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
    ],
)
def test_bad_input(shared_server, path, body, status, word):
    answer = shared_server.post(path, body)
    assert answer.status_code == status
    assert word in answer.json()["error"]["message"]


def test_version(shared_server):
    assert shared_server.get("/version").json() == {"version": octavo.__version__}


def test_probes_leave_no_lines_in_the_log(shared_server):
    for path in ("/health", "/livez", "/readyz", "/metrics", "/load", "/ping"):
        shared_server.get(path)
    shared_server.get("/v1/models?marker=1")
    log = shared_server.log
    assert "GET /v1/models?marker=1" in log
    assert "GET /health" not in log and "GET /metrics" not in log and "GET /ping" not in log
