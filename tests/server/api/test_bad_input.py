"""Whatever a client sends: the right 4xx in OpenAI's form, within a second, and the neighbours notice nothing."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from support.neighbour import PROMPT, Neighbour
from support.run_queue import OwnTime

LONG = "brown fox " * 2_000
USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(shared_server):
    neighbour = Neighbour(shared_server.url, shared_server.pids)
    neighbour.start()
    yield shared_server
    neighbour.check(longest_gap=2.0 * SLACK)
    answer = shared_server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2})
    assert answer.status_code == 200
    assert shared_server.get("/health").status_code == 200


def check(response: httpx.Response, status: int, seconds: float, *words: str) -> None:
    assert response.status_code == status, response.text[:500]
    assert seconds < 1.0 * SLACK
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"]
    for word in words:
        assert word in error["message"], error["message"]


SLACK = 3.0  # test machines are shared


def timed(server, function, *args, **kwargs):
    """The answer, and its seconds without those in which the server waited for a processor that others had."""
    own = OwnTime(server.pids)
    return function(*args, **kwargs), own.seconds


# What is sent -> what the message must name. All of these are 400 for /v1/completions.
BAD_COMPLETIONS = {
    "no prompt": ({}, ["prompt"]),
    "empty prompt": ({"prompt": ""}, ["prompt", "empty"]),
    "empty list": ({"prompt": []}, ["prompt", "empty"]),
    "empty ids among others": ({"prompt": [[1], []]}, ["prompt", "empty"]),
    "mixed prompt": ({"prompt": [1, "a"]}, ["prompt"]),
    "prompt is a number": ({"prompt": 7}, ["prompt", "7"]),
    "too long": ({"prompt": LONG, "max_tokens": 1}, ["prompt", "1024"]),
    "far too long": ({"prompt": "x" * 4_000_000}, ["prompt", "1024"]),
    "too many ids": ({"prompt": [5] * 1024}, ["prompt", "1024"]),
    "negative id": ({"prompt": [1, -1]}, ["-1", "399"]),
    "id beyond the vocabulary": ({"prompt": [1, 400]}, ["400", "399"]),
    "huge id": ({"prompt": [2**70]}, ["399"]),
    "boolean among ids": ({"prompt": [1, True]}, ["prompt"]),
    "fraction among ids": ({"prompt": [1, 2.5]}, ["prompt"]),
    "boolean for a number": ({"max_tokens": True}, ["max_tokens", "true"]),
    "boolean temperature": ({"temperature": True}, ["temperature"]),
    "text for a number": ({"max_tokens": "10"}, ["max_tokens", "10"]),
    "number for a boolean": ({"stream": 1}, ["stream"]),
    "NaN": (b'{"prompt": "x", "temperature": NaN}', ["temperature"]),
    "Infinity": (b'{"prompt": "x", "top_p": Infinity}', ["top_p"]),
    "1e309": (b'{"prompt": "x", "presence_penalty": 1e309}', ["presence_penalty"]),
    "NaN bias": (b'{"prompt": "x", "logit_bias": {"5": NaN}}', ["logit_bias"]),
    "n = 0": ({"n": 0}, ["n ", "0"]),
    "n = a million": ({"n": 10**6}, ["n ", "1000000"]),
    "max_tokens = a billion": ({"max_tokens": 10**9}, ["max_tokens", "1000000000"]),
    "negative max_tokens": ({"max_tokens": -2}, ["max_tokens", "-2"]),
    "zero max_tokens without echo": ({"max_tokens": 0}, ["max_tokens"]),
    "logprobs = a million": ({"logprobs": 10**6}, ["logprobs", "20"]),
    "negative logprobs": ({"logprobs": -1}, ["logprobs"]),
    "prompt_logprobs = a million": ({"prompt_logprobs": 10**6}, ["prompt_logprobs"]),
    "10,000 stop strings": ({"stop": ["x"] * 10_000}, ["stop"]),
    "empty stop string": ({"stop": ["a", ""]}, ["stop"]),
    "endless stop string": ({"stop": "x" * 100_000}, ["stop"]),
    "stop of numbers": ({"stop": [1]}, ["stop"]),
    "10,000 stop tokens": ({"stop_token_ids": [1] * 10_000}, ["stop_token_ids"]),
    "stop token beyond the vocabulary": ({"stop_token_ids": [400]}, ["stop_token_ids", "400"]),
    "10,000 bad words": ({"bad_words": ["x"] * 10_000}, ["bad_words"]),
    "empty bad word": ({"bad_words": [" "]}, ["bad_words"]),
    "min_tokens > max_tokens": ({"min_tokens": 9, "max_tokens": 3}, ["min_tokens", "9", "3"]),
    "negative min_tokens": ({"min_tokens": -1}, ["min_tokens"]),
    "presence_penalty 99": ({"presence_penalty": 99}, ["presence_penalty", "99", "2"]),
    "frequency_penalty -99": ({"frequency_penalty": -99}, ["frequency_penalty", "-99"]),
    "repetition_penalty 0": ({"repetition_penalty": 0}, ["repetition_penalty"]),
    "top_p 0": ({"top_p": 0}, ["top_p", "0"]),
    "top_p 1.1": ({"top_p": 1.1}, ["top_p"]),
    "top_k -2": ({"top_k": -2}, ["top_k"]),
    "min_p 2": ({"min_p": 2}, ["min_p"]),
    "temperature -1": ({"temperature": -1}, ["temperature"]),
    "seed beyond 64 bits": ({"seed": 2**70}, ["seed"]),
    "priority beyond 64 bits": ({"priority": 2**70}, ["priority"]),
    "bias of no token": ({"logit_bias": {"four": 1}}, ["logit_bias", "four"]),
    "bias beyond the vocabulary": ({"logit_bias": {"400": 1}}, ["logit_bias", "400"]),
    "nothing allowed": ({"allowed_token_ids": []}, ["allowed_token_ids"]),
    "allowed beyond the vocabulary": ({"allowed_token_ids": [400]}, ["allowed_token_ids", "400"]),
    "suffix": ({"suffix": "the end"}, ["suffix"]),
    "best_of > 1": ({"best_of": 4}, ["best_of"]),
    "stream_options without stream": ({"stream_options": {"include_usage": True}}, ["stream_options"]),
    "2,000 prompts": ({"prompt": ["x"] * 2_000}, ["prompt", "1024"]),
    "truncation beyond the model": ({"truncate_prompt_tokens": 5_000}, ["truncate_prompt_tokens"]),
    "an unsupported field": ({"prompt_embeds": "AAAA"}, ["prompt_embeds"]),
    "beam search": ({"use_beam_search": True}, ["use_beam_search"]),
    "a list": (b"[1]", ["object"]),
    "no JSON": (b"hello", ["JSON"]),
    "cut-off JSON": (b'{"prompt": "x"', ["JSON"]),
    "nothing": (b"", ["JSON"]),
    "JSON nested 100,000 deep": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ["JSON"]),
    "nested in an unknown field": (b'{"prompt": "x", "y": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ["JSON"]),
    "invalid UTF-8": (b'{"prompt": "\xff\xfe"}', ["JSON"]),
    "a lone surrogate": (b'{"prompt": "\\ud800"}', ["JSON"]),
    "a number of 5,000 digits": (b'{"prompt": "x", "max_tokens": ' + b"9" * 5_000 + b"}", ["JSON"]),
}


@pytest.mark.parametrize("name", BAD_COMPLETIONS)
def test_bad_completion(server, name):
    body, words = BAD_COMPLETIONS[name]
    if isinstance(body, dict):
        body = json.dumps(body if "prompt" in body or name == "no prompt" else {"prompt": "x", **body}).encode()
    response, seconds = timed(
        server,
        httpx.post,
        server.url + "/v1/completions",
        content=body,
        headers={"content-type": "application/json"},
        timeout=90,
    )
    check(response, 400, seconds, *words)


BAD_CHATS = {
    "no messages": ({"messages": []}, ["messages", "empty"]),
    "messages is a text": ({"messages": "Hello"}, ["messages"]),
    "a message is a text": ({"messages": ["Hello"]}, ["messages"]),
    "no role": ({"messages": [{"content": "x"}]}, ["messages.0.role"]),
    "unknown role": ({"messages": [{"role": "boss", "content": "x"}]}, ["messages.0.role", "boss"]),
    "role is a list": ({"messages": [{"role": ["user"], "content": "x"}]}, ["messages.0.role"]),
    "no content": ({"messages": [*USER, {"role": "user"}]}, ["messages.1.content"]),
    "null content": ({"messages": [{"role": "user", "content": None}]}, ["messages.0.content"]),
    "content is a number": ({"messages": [{"role": "user", "content": 5}]}, ["messages.0.content", "5"]),
    "content part without type": ({"messages": [{"role": "user", "content": [{}]}]}, ["messages.0.content.0"]),
    "an image": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}]}
            ]
        },
        ["image_url", "text only"],
    ),
    "broken tool call": ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, ["messages.0.tool_calls.0"]),
    "broken arguments": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{} x"}}]}]},
        ["arguments"],
    ),
    "the template says no": ({"messages": [{"role": "tool", "content": ""}]}, ["empty tool answer"]),
    "top_logprobs without logprobs": ({"top_logprobs": 2}, ["top_logprobs", "logprobs"]),
    "top_logprobs = a million": ({"top_logprobs": 10**6, "logprobs": True}, ["logprobs", "20"]),
    "logprobs is a number": ({"logprobs": 3}, ["logprobs"]),
    "too long": ({"messages": [{"role": "user", "content": LONG}]}, ["1024"]),
    "too much asked": ({"max_tokens": 1024}, ["max_tokens", "1024"]),
    "unknown response_format": ({"response_format": {"type": "xml"}}, ["response_format"]),
    "a template of one's own": ({"chat_template": "{{ 1 }}"}, ["chat_template"]),
    "continue and generate": (
        {"continue_final_message": True, "add_generation_prompt": True},
        ["continue_final_message"],
    ),
    "reserved template variables": (
        {"chat_template_kwargs": {"tools": [], "x": 1, "messages": []}},
        ["chat_template_kwargs", "messages, tools"],
    ),
    "audio": ({"modalities": ["audio"]}, ["modalities"]),
}


@pytest.mark.parametrize("name", BAD_CHATS)
def test_bad_chat(server, name):
    body, words = BAD_CHATS[name]
    response, seconds = timed(server, server.post, "/v1/chat/completions", {"messages": USER, **body})
    check(response, 400, seconds, *words)


def test_unknown_model(server):
    response, seconds = timed(server, server.post, "/v1/completions", {"model": "gpt-9", "prompt": "x"})
    check(response, 404, seconds, "gpt-9", "tiny")
    assert response.json()["error"]["code"] == "model_not_found"
    check(server.get("/v1/models/gpt-9"), 404, 0, "gpt-9")


def test_unknown_paths_and_methods(server):
    check(server.get("/v2/nothing"), 404, 0, "/v2/nothing", "/docs")
    for path, instead in (
        ("systemone", "/v1/decisions"),
        ("messages/batches", "/v1/batches"),
        ("images/edits", "image"),
    ):
        answer = server.post(f"/v1/{path}", {"model": "tiny"})
        assert answer.status_code == 404 and f"/v1/{path}: " in answer.text and instead in answer.text
    check(server.get("/v1/systemone_"), 404, 0, "/docs")
    check(server.get("/v1/completions"), 405, 0, "GET")
    assert server.get("/v1/completions").headers["allow"] == "POST"
    check(httpx.request("DELETE", server.url + "/v1/models"), 405, 0, "DELETE")
    check(httpx.request("BREW", server.url + "/health"), 400, 0)  # no method of HTTP


def test_other_content_types(server):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        response = httpx.post(
            server.url + "/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": kind}
        )
        check(response, 415, 0, "application/json")


def test_compressed_bodies(server):
    response = httpx.post(server.url + "/v1/completions", json={"prompt": "x"}, headers={"content-encoding": "gzip"})
    check(response, 415, 0, "Content-Encoding", "gzip")


@pytest.mark.parametrize("piece", [b'{"a":[1,2,3]}', b"5"], ids=["nested", "numbers"])
def test_millions_of_values(server, piece):
    """They would hold up the event loop for half a second, if they were parsed."""
    body = b'{"prompt": "x", "unknown": [' + b",".join([piece] * 250_000) + b"]}"
    headers = {"content-type": "application/json"}
    response, seconds = timed(
        server, httpx.post, server.url + "/v1/completions", content=body, headers=headers, timeout=90
    )
    check(response, 413, seconds, "200000 values")


def test_ten_megabytes(server):
    body = b'{"prompt": "' + b"x" * 10_000_000 + b'"}'
    response, seconds = timed(
        server,
        httpx.post,
        server.url + "/v1/completions",
        content=body,
        headers={"content-type": "application/json"},
        timeout=90,
    )
    check(response, 413, seconds, "--max-request-bytes", "takes text only, no images")

    def pieces():
        for _ in range(100):
            yield b"x" * 100_000

    try:  # without a content-length; the server may close while we still send
        response = httpx.post(
            server.url + "/v1/completions", content=pieces(), headers={"content-type": "application/json"}, timeout=90
        )
        check(response, 413, 0)
    except httpx.WriteError:
        pass


# Below HTTP.


def exchange(server, data: bytes, timeout: float = 20.0) -> bytes:
    """Send bytes, read until the server closes or answers."""
    with server.connect() as sock:
        sock.settimeout(timeout)
        try:
            sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = b""
        try:
            while piece := sock.recv(65536):
                answer += piece
                if b"\r\n\r\n" in answer and answer.endswith(b"}"):
                    break
        except (TimeoutError, ConnectionResetError):
            pass
        return answer


def error_in(answer: bytes) -> dict:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    return json.loads(body)["error"]


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        POST + b"Content-Length: -5\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nZZZ\r\n",
    ],
)
def test_bytes_that_are_not_http(server, data):
    answer = exchange(server, data)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert error_in(answer)["code"] in ("invalid_http", "invalid_json")


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.1\r\nX: " + b"a" * 1_000_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 200_000 + b"\r\n",
        b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_giant_heads(server, data):
    answer, seconds = timed(server, exchange, server, data)
    assert answer == b"" or answer.startswith(
        b"HTTP/1.1 431 "
    )  # what we still send may make the kernel drop the answer
    assert seconds < 3.0


def test_a_large_head_that_waits_for_the_answer(server):
    answer = exchange(server, b"GET /health HTTP/1.1\r\nX: " + b"a" * 70_000)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert error_in(answer)["code"] == "head_too_large"


def test_slow_senders_keep_nobody_waiting(server):
    """200 clients that never finish their headers."""
    socks = []
    try:
        for _ in range(200):
            sock = server.connect()
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
            socks.append(sock)
        response, seconds = timed(server, server.post, "/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert response.status_code == 200 and seconds < 2.0 * SLACK
    finally:
        for sock in socks:
            sock.close()


def test_there_are_descriptors_for_many_clients(shared_server):
    """Whatever soft limit the server was started with: this machine's shells may set a low one."""
    limits = Path(f"/proc/{shared_server.process.pid}/limits").read_text().splitlines()
    soft, hard = next(line.split()[3:5] for line in limits if line.startswith("Max open files"))
    assert soft == hard or int(soft) >= 65_535
    code = (
        "import resource as r; from octavo.system.limits import allow_many_descriptors\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (256, 1_000)); allow_many_descriptors(); print(r.getrlimit(r.RLIMIT_NOFILE))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "(1000, 1000)"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"X-Request-Id": "twin"}, {"X-Request-Id": "twin"}),
        ({"request_id": "twin"}, {"X-Request-Id": "twin"}),
        ({"X-Request-Id": "other", "request_id": "twin"}, {"request_id": "twin"}),
    ],
    ids=["header", "body then header", "body"],
)
def test_a_request_id_that_is_in_use(server, first, second):
    """Refused while the first request is under way, in whichever way the two say it; free again afterwards."""

    def ask(identity: dict[str, str], **more) -> tuple[dict, dict]:
        headers = {k: v for k, v in identity.items() if k.startswith("X-")}
        return {"prompt": PROMPT, "max_tokens": 5, "request_id": identity.get("request_id"), **more}, headers

    body, headers = ask(first, max_tokens=900, ignore_eos=True, stream=True)
    with httpx.stream("POST", server.url + "/v1/completions", json=body, headers=headers, timeout=90) as under_way:
        assert under_way.headers["x-request-id"] == "twin"
        lines = under_way.iter_lines()  # kept: the connection closes with it
        next(lines)
        body, headers = ask(second)
        response, seconds = timed(server, server.post, "/v1/completions", body, headers=headers)
        check(response, 409, seconds, "twin", "in use")
        assert response.json()["error"]["code"] == "duplicate_request_id"
        chat = {"messages": USER, "max_tokens": 5, "request_id": body["request_id"]}
        response, seconds = timed(server, server.post, "/v1/chat/completions", chat, headers=headers)
        check(response, 409, seconds, "twin")
    wait_until(lambda: server.post("/v1/completions", body, headers=headers).status_code == 200)


def test_request_ids_may_repeat_where_the_server_says_so(unusual):
    """Behind meshes that hand X-Request-Id on: each request gets its own answer."""
    answers: list[httpx.Response] = []
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}

    def send() -> None:
        answers.append(unusual.post("/v1/completions", body, headers={"X-Request-Id": "twin"}))

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [a.status_code for a in answers] == [200] * 4
    assert len({a.json()["choices"][0]["text"] for a in answers}) == 1


def wait_until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(server, stream):
    """The load goes back to the neighbour's one request, and no sequence is one of 1,000 tokens."""
    before = num_aborted(server)
    body = json.dumps({"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": stream, "n": 20}).encode()
    head = POST + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with server.connect() as sock:
        sock.sendall(head + body)
        if stream:
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        wait_until(lambda: server.get("/load").json()["server_load"] >= 2)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # leave with a reset
    wait_until(lambda: server.get("/load").json()["server_load"] <= 1)
    assert num_aborted(server) == before + 20


def num_aborted(server) -> float:
    line = re.search(
        r'(?m)^vllm:request_success_total\{.*finished_reason="abort".*\} (\S+)$', server.get("/metrics").text
    )
    assert line is not None
    return float(line[1])
