"""LoRA adapters over HTTP: named in `model`, listed, loaded, replaced and unloaded while the server runs."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from support.adapters import write_adapter
from support.serving import Engine

MODULES = {"self_attn.q_proj": (32, 32), "mlp.down_proj": (32, 64)}
PROMPT = list(range(10, 60))


def make(path: Path, seed: int, rank: int = 4) -> Path:
    shapes = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in MODULES.items()}
    write_adapter(path, shapes, seed, r=rank, lora_alpha=8 * rank)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def server(folder) -> Iterator[Engine]:
    make(folder / "own", 1)
    for number in range(2, 6):
        make(folder / "dir" / f"a{number}", number, rank=number)
    (folder / "dir" / "link").symlink_to(folder / "own")
    flags = (
        "--enable-lora",
        "--max-loras",
        "2",
        "--lora-modules",
        f"own={folder / 'own'}",
        "--lora-dir",
        str(folder / "dir"),
        "--allow-runtime-lora-updating",
        "--max-model-len",
        "256",
    )
    with Engine(folder, *flags) as engine:
        yield engine


def ask(server: Engine, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}", data, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    return status, json.loads(text) if text.startswith("{") else text


def complete(server: Engine, model: str, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | fields
    status, answer = ask(server, "/v1/completions", body)
    assert status == 200, answer
    return answer


def test_requests_name_an_adapter_in_every_dialect(server):
    base, own = complete(server, "tiny"), complete(server, "own")
    assert own["model"] == "own" and base["model"] == "tiny"
    assert own["choices"][0]["text"] != base["choices"][0]["text"]
    assert own["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # not the base's
    assert complete(server, "own")["choices"] == own["choices"]
    message = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    for path, body in (
        ("/v1/chat/completions", message),
        ("/v1/messages", message),
        ("/api/chat", message | {"stream": False}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 4}),
        ("/api/generate", {"prompt": "hello", "stream": False, "raw": True}),
    ):
        status, answer = ask(server, path, body | {"model": "nobody"})
        assert status == 404 and "nobody" in json.dumps(answer), path
        status, answer = ask(server, path, body | {"model": "own"})
        assert answer.get("model") == "own" or "template" in json.dumps(answer), (path, answer)
    status, answer = ask(server, "/v1/embeddings", {"model": "own", "input": "x"})
    assert status == 400 and "adapter" in answer["error"]["message"]


def test_adapters_are_models_with_parents(server):
    cards = {card["id"]: card for card in ask(server, "/v1/models")[1]["data"]}
    assert cards["tiny"]["parent"] is None and cards["own"]["parent"] == "tiny"
    assert cards["own"]["root"].endswith("/own") and cards["own"]["root"] != cards["tiny"]["root"]
    assert ask(server, "/v1/models/own")[1] == cards["own"]
    assert "own" in [tag["name"].removesuffix(":latest") for tag in ask(server, "/api/tags")[1]["models"]]


def test_adapters_come_and_go_while_the_server_runs(server, folder):
    load_path, unload_path = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    assert ask(server, load_path, {"lora_name": "a2", "lora_path": "a2"})[0] == 200
    first = complete(server, "a2")["choices"][0]["text"]
    assert complete(server, "a2")["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    status, answer = ask(server, load_path, {"lora_name": "a2", "lora_path": str(folder / "dir" / "a3")})
    assert status == 400 and "load_inplace" in answer["error"]["message"]
    replaced = {"lora_name": "a2", "lora_path": str(folder / "dir" / "a3"), "load_inplace": True}
    assert ask(server, load_path, replaced)[0] == 200
    other = complete(server, "a2")
    assert other["choices"][0]["text"] != first
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "keys of the weights before"
    for name in ("a4", "a5"):  # more than there are slots
        assert ask(server, load_path, {"lora_name": name, "lora_path": name})[0] == 200
        assert complete(server, name)["model"] == name
    assert complete(server, "a2")["choices"] == other["choices"]
    line = lora_line(server)
    assert 'max_lora="2"' in line and "running_lora_adapters" in line and "waiting_lora_adapters" in line
    for name in ("a2", "a4", "a5"):
        assert ask(server, unload_path, {"lora_name": name})[0] == 200
    status, answer = ask(server, unload_path, {"lora_name": "a2"})
    assert status == 404 and "a2" in answer["error"]["message"]
    status, answer = ask(server, "/v1/completions", {"model": "a2", "prompt": [1]})
    assert status == 404 and answer["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("name", "path", "says"),
    [
        ("x", "../own", "not below --lora-dir"),
        ("x", "/etc", "not below --lora-dir"),
        ("x", "link", "not below --lora-dir"),
        ("x", "nothing", "adapter_config.json"),
        ("x", "a2\0", "cannot be read"),
        ("tiny", "a2", "own name"),
        ("no name", "a2", "letters"),
        ("", "a2", "letters"),
    ],
)
def test_adapters_that_cannot_be_loaded_give_400_and_one_line(server, name, path, says):
    status, answer = ask(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
    assert status == 400 and says in answer["error"]["message"] and "\n" not in answer["error"]["message"]
    assert [card["id"] for card in ask(server, "/v1/models")[1]["data"]] == ["tiny", "own"]


def load(server: Engine, name: str, path: str, **fields: Any) -> tuple[int, str]:
    status, answer = ask(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path} | fields)
    return status, answer if isinstance(answer, str) else answer["error"]["message"]


def unload(server: Engine, name: str) -> int:
    return ask(server, "/v1/unload_lora_adapter", {"lora_name": name})[0]


def test_adapters_that_are_loaded_at_once_do_not_harm_each_other(server, folder):
    """Twelve names, four of them twice, damaged ones among them, while requests for another go on."""
    make(folder / "dir" / "wide", 9, rank=20)
    make(folder / "dir" / "damaged", 9)
    (folder / "dir" / "damaged" / "adapter_model.safetensors").write_bytes(b"{}")
    wanted = complete(server, "own")["choices"]
    paths = [(f"c{i}", f"a{2 + i % 4}") for i in range(12)] + [("c0", "a2")] * 4 + [("w", "wide"), ("d", "damaged")] * 2
    with ThreadPoolExecutor(12) as pool:
        busy = [pool.submit(complete, server, "own") for _ in range(4)]
        answers = list(pool.map(lambda pair: (pair[0], *load(server, *pair)), paths))
        assert all(one.result()["choices"] == wanted for one in busy)
    counts = Counter((name, status) for name, status, _ in answers)
    assert all(counts[f"c{i}", 200] == 1 for i in range(12)) and counts["c0", 400] == 4
    for name, status, message in answers:
        if name in "wd":
            assert status == 400 and "\n" not in message and name in message
    assert any("rank" in message for name, _, message in answers if name == "w")
    texts = {i: complete(server, f"c{i}")["choices"][0]["text"] for i in range(12)}
    assert all(texts[i] == texts[i % 4] for i in range(12)) and len(set(texts.values())) == 4
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(lambda i: unload(server, f"c{i}"), range(12))) == [200] * 12


def test_a_replacement_that_fails_leaves_what_was_there(server):
    assert load(server, "r", "a2", load_inplace=True)[0] == 200  # nothing is there to be replaced
    before = complete(server, "r")["choices"]
    for path in ("nothing", "../own"):
        assert load(server, "r", path, load_inplace=True)[0] == 400
    assert complete(server, "r")["choices"] == before
    assert unload(server, "r") == 200 and load(server, "r", "a2")[0] == 200  # its name is free again
    assert complete(server, "r")["choices"] == before
    assert unload(server, "r") == 200 and unload(server, "r") == 404


@pytest.mark.parametrize(
    "body", [{}, {"lora_name": "x"}, {"lora_path": "a2"}, {"lora_name": 1, "lora_path": "a2"}, {"lora_name": None}]
)
def test_a_body_without_what_is_needed_is_a_400(server, body):
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        if path.startswith("/v1/load") or "lora_name" not in body or not isinstance(body["lora_name"], str):
            status, answer = ask(server, path, body)
            assert status == 400 and "lora_" in answer["error"]["message"]


@pytest.mark.parametrize("seconds", [pytest.param(2, id="briefly"), pytest.param(600, marks=pytest.mark.long)])
def test_twenty_adapters_take_turns_in_two_slots(server, folder, seconds):
    """At random, from eight users: nobody waits long, each gets its own adapter's answer, nothing is left over."""
    names = [f"t{i}" for i in range(20)]
    for number, name in enumerate(names):
        make(folder / "dir" / name, 20 + number, rank=1 + number % 8)
        assert load(server, name, name)[0] == 200
    expected = {name: complete(server, name)["choices"][0]["text"] for name in names}
    end = time.monotonic() + seconds

    def use(number: int) -> list[float]:
        draw, waited = random.Random(number), []
        while time.monotonic() < end:
            name, begun = draw.choice(names), time.monotonic()
            assert complete(server, name)["choices"][0]["text"] == expected[name]
            waited.append(time.monotonic() - begun)
        return waited

    with ThreadPoolExecutor(8) as pool:
        waits = sorted(chain(*pool.map(use, range(8))))
    assert len(waits) > 8 and waits[-1] <= max(5.0, 50 * waits[len(waits) // 2])
    assert [unload(server, name) for name in names] == [200] * 20
    until = time.monotonic() + 90
    while 'running_lora_adapters=""' not in (line := lora_line(server)) or 'waiting_lora_adapters=""' not in line:
        assert time.monotonic() < until, line
        time.sleep(0.05)


def lora_line(server: Engine) -> str:
    lines = ask(server, "/metrics")[1].splitlines()
    return next(line for line in lines if line.startswith("vllm:lora_requests_info{"))


def test_without_the_flag_nothing_can_be_changed(tmp_path):
    """Here with two engines, each of which reads what --lora-modules names."""
    make(tmp_path / "own", 1)
    flags = "--enable-lora", "--lora-modules", f"own=file://{tmp_path / 'own'}", "--data-parallel-size", "2"
    with Engine(tmp_path, *flags) as engine, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: complete(engine, "own"), range(6)))
        assert all(answer["model"] == "own" for answer in answers)
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
        assert complete(engine, "tiny")["choices"][0]["text"] != answers[0]["choices"][0]["text"]
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            status, answer = ask(engine, path, {"lora_name": "own", "lora_path": str(tmp_path / "own")})
            assert status == 403 and "--allow-runtime-lora-updating" in answer["error"]["message"]
