"""`octavo run-batch`: every line answered once, whatever else is in the file and whenever it is killed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import batch_lines

from octavo.cli.main import main
from octavo.entrypoints.batches.lines import Limits, answered, done_in, failed, parse_line, read_lines, split_lines

MESSAGES = [{"role": "user", "content": "The quick brown fox"}]
CHAT = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0}
GOOD = [
    ("chat", "/v1/chat/completions", CHAT),
    ("text", "/v1/completions", {"prompt": "The fox", "max_tokens": 4, "temperature": 0}),
    ("vector", "/v1/embeddings", {"input": "The fox"}),
    ("score", "/v1/score", {"text_1": "a fox", "text_2": "a dog"}),
    ("rerank", "/v1/rerank", {"query": "fox", "documents": ["a dog", "a fox"]}),
    ("sure", "/v1/decisions", {"input": "The fox", "questions": [{"type": "predicate", "instructions": "x"}]}),
    ("item", "/v1/responses", {"input": "The fox", "max_output_tokens": 5, "temperature": 0}),
]
BAD = [
    ("unknown-model", "/v1/chat/completions", {**CHAT, "model": "gpt-4"}, "model_not_found"),
    ("too-long", "/v1/completions", {"prompt": "fox " * 3000}, "context_length_exceeded"),
    ("wrong-type", "/v1/chat/completions", {**CHAT, "temperature": "hot"}, "invalid_request_error"),
    ("streams", "/v1/chat/completions", {**CHAT, "stream": True}, "invalid_line"),
    ("elsewhere", "/v1/images", {}, "invalid_line"),
]


def line(custom_id: str, url: str, body: dict) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def command(tiny_model, source, target, *more: str) -> list[str]:
    flags = ["--model", str(tiny_model), "--load-format", "dummy", "--served-model-name", "tiny"]
    return ["run-batch", "-i", str(source), "-o", str(target), *flags, "--kv-cache-memory-bytes", str(32 << 20), *more]


def start(arguments: list[str]) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "octavo.cli.main", *arguments], stderr=subprocess.PIPE, text=True, env=env
    )


def test_good_lines_are_answered_as_by_a_server_and_bad_ones_harm_none(tiny_model, shared_server, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line(*one) for one in GOOD] + [line(*one[:3]) for one in BAD]
    again = line("chat", "/v1/chat/completions", CHAT)
    lines[3:3] = ["{not json\n", "\n", "[]\n", json.dumps({"url": "/v1/completions"}) + "\n", again]
    source.write_text("".join(lines))
    process = start(command(tiny_model, source, target))
    _, said = process.communicate(timeout=100)
    assert process.returncode == 0, said
    assert "16 of 16 lines, 9 failed" in said
    found = [json.loads(raw) for raw in target.read_text().splitlines()]
    assert len(found) == 16 and len({one["id"] for one in found}) == 16
    by_id = {one["custom_id"]: one for one in found if one["custom_id"]}
    assert len(by_id) == 12
    for name, url, body in GOOD:
        one = by_id[name]
        assert one["error"] is None and one["response"]["status_code"] == 200
        theirs, ours = shared_server.post(url, body).json(), one["response"]["body"]
        for answer in (ours, theirs):  # what others asked this server before may be cached
            for details in ("prompt_tokens_details", "input_tokens_details"):
                answer.get("usage", {}).pop(details, None)
            for item in answer.get("output", ()):
                del item["id"]
        for key in ("choices", "output", "usage", "results", "answers"):
            assert ours.get(key) == theirs.get(key)
        if name == "vector":
            assert ours["data"][0]["embedding"] == pytest.approx(theirs["data"][0]["embedding"], abs=1e-5)
    for name, _, _, code in BAD:
        assert by_id[name]["error"]["code"] == code, by_id[name]
    problems = [one["error"]["message"] for one in found if one["custom_id"] is None]
    assert len(problems) == 4 and any("that of line 1, too" in text for text in problems)
    before = target.read_bytes()
    assert main(command(tiny_model, source, target)) == 0  # nothing is left: no model is loaded
    assert target.read_bytes() == before


def test_bad_lines_harm_no_others(tiny_model, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(batch_lines.LINES))
    process = start(command(tiny_model, source, target))
    _, said = process.communicate(timeout=100)
    assert process.returncode == 0, said
    found = [json.loads(raw) for raw in target.read_bytes().split(b"\n") if raw]
    answers = [one["custom_id"] for one in found if one["error"] is None]
    assert sorted(answers) == sorted(batch_lines.ANSWERED)
    assert len(found) == len(answers) + len(batch_lines.STRANGE) == len({one["id"] for one in found})
    assert main(command(tiny_model, source, target)) == 0  # nothing is left: no model is loaded


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on(tiny_model, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "The fox", "max_tokens": 60, "ignore_eos": True}
    source.write_text("".join(line(f"{i}", "/v1/completions", body) for i in range(120)))
    arguments = command(tiny_model, source, target, "--concurrency", "2")
    process = start(arguments)
    deadline = time.monotonic() + 90
    while not target.exists() or target.read_bytes().count(b"\n") < 5:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = target.read_bytes()
    assert 5 <= kept.count(b"\n") < 120
    target.write_bytes(kept + b'{"id": "batch_req_1", "custom_')  # what a kill in the middle of a line leaves
    process = start([*arguments[:-1], "64"])
    _, said = process.communicate(timeout=100)
    assert process.returncode == 0 and "lines are answered already" in said
    final = target.read_bytes()
    assert final.startswith(kept)
    ids = [json.loads(raw)["custom_id"] for raw in final.splitlines()]
    assert sorted(ids, key=int) == [str(i) for i in range(120)]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["-i", "{tmp}/none.jsonl", "-o", "{tmp}/out"], "none.jsonl"),
        (["-i", "{tmp}/in.jsonl", "-o", "{tmp}/no/out"], "no/out"),
        (["-i", "{tmp}/in.jsonl", "-o", "{tmp}/in.jsonl"], "error: input and output are the same file"),
        (["-i", "{tmp}/in.jsonl", "-o", "{tmp}/out", "--model", "smollm2"], "did you mean smollm2-135m-instruct?"),
        (["-i", "{tmp}/in.jsonl", "-o", "{tmp}/out", "--concurrency", "0"], "--concurrency"),
    ],
)
def test_impossible_runs_are_refused_in_one_line(flags, word, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text(line("a", "/v1/completions", {"prompt": "x"}))
    assert main(["run-batch", *(flag.format(tmp=tmp_path) for flag in flags)]) == 1
    said = capsys.readouterr().err
    assert word in said and said.startswith("octavo: error: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    [
        line("a", "/v1/completions", {"prompt": "x"}),  # the requests: the two flags were swapped
        '{"id": "batch_req_1", "custom_id": "a"}\nmy notes\n',
        '{"id": "invoice 7"}\n',
        '{"id": "batch_req_1", "cust\n',
        "my notes",
        "[]\n",
    ],
)
def test_a_file_of_something_else_is_never_cut(text, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text(line("a", "/v1/completions", {"prompt": "x"}))
    (tmp_path / "out").write_text(text)
    assert main(["run-batch", "-i", f"{tmp_path}/in.jsonl", "-o", f"{tmp_path}/out"]) == 1
    said = capsys.readouterr().err
    assert "is not an answer of a batch" in said and said.startswith("octavo: error: ") and said.count("\n") == 1
    assert (tmp_path / "out").read_text() == text
    assert main(["run-batch", "-i", f"{tmp_path}/none", "-o", f"{tmp_path}/new"]) == 1
    assert not (tmp_path / "new").exists()


SCRAPS = st.text(st.characters(codec=None), max_size=6) | st.sampled_from(
    ["\ud800", "\udfff\ud800", "a\u2028b\x85", "\r"]
)
VALUES = st.recursive(
    SCRAPS | st.none() | st.booleans() | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCRAPS, inner, max_size=3),
    max_leaves=6,
)
KEYS = {"custom_id": SCRAPS | VALUES, "url": st.just(batch_lines.URL) | VALUES, "body": VALUES}
OBJECTS = st.fixed_dictionaries({}, optional={**KEYS, "method": st.just("POST") | VALUES, "more": VALUES})
RAW = st.binary(max_size=200) | st.builds(
    lambda value, is_ascii: json.dumps(value, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass"),
    OBJECTS | VALUES,
    st.booleans(),
)


@given(RAW)
def test_no_line_is_too_strange_to_be_read(raw):
    found = parse_line(7, raw)
    written = answered(found, 200, "r", b"{}") if found.problem is None else failed(found, "x", found.problem)
    assert written.count(b"\n") == 1 and json.loads(written)["custom_id"] == found.custom_id
    if found.problem is None:
        assert json.loads(found.body.decode()) == json.loads(raw.decode("utf-8-sig"))["body"]


@given(st.lists(RAW, max_size=6), st.sampled_from([b"\n", b"\r\n", b"\n \n"]))
def test_every_line_is_read_once(raws, end):
    data = end.join(raws)
    found = list(read_lines(io.BytesIO(data), Limits(150, 30)))
    assert [line.number for line in found] == [i for i, raw in enumerate(data.split(b"\n"), 1) if raw.strip()]
    for line, raw in zip(found, [raw for raw in data.split(b"\n") if raw.strip()], strict=True):
        assert line.problem or len(raw) <= 150
    good = [line.custom_id for line in found if line.problem is None]
    assert len(good) == len(set(good))


@given(st.binary(max_size=60) | st.text("a\n", max_size=60).map(str.encode), st.integers(1, 8))
def test_long_lines_keep_their_beginning(data, most):
    whole = data.split(b"\n")
    lines = [line + b"\n" for line in whole[:-1]] + whole[-1:]
    assert list(split_lines(io.BytesIO(data), most)) == [line[: most + 1] for line in lines if line]


@given(st.lists(st.tuples(st.text(min_size=1, max_size=5), st.booleans()), max_size=5), st.data())
def test_whole_lines_are_known_again_and_the_rest_is_cut_off(entries, data):
    lines = [parse_line(i, line(name, "/v1/completions", {}).encode()) for i, (name, _) in enumerate(entries, 1)]
    written = [
        answered(one, 200, "r", b"{}") if fine else failed(one, "c", "m")
        for one, (_, fine) in zip(lines, entries, strict=True)
    ]
    output = b"".join(written)
    cut = data.draw(st.integers(0, len(output)))
    ids, custom_ids, length = done_in(io.BytesIO(output[:cut]))
    whole = output[:cut].count(b"\n")
    assert length == sum(map(len, written[:whole])) and ids == {one.id for one in lines[:whole]}
    assert custom_ids == {one.custom_id for one in lines[:whole]}
