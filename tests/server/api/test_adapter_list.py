"""--lora-list: adapters are fetched, served before the server is ready, and followed; a broken one harms nobody."""

from __future__ import annotations

import hashlib
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.adapters import write_adapter
from support.hub_server import Hub, Repo
from support.serving import Engine

from octavo.entrypoints.lora.listed import Entry, parse_list, read_credentials
from octavo.errors import ConfigError

WEIGHTS = "adapter_model.safetensors"


def adapter(folder: Path, seed: int, rank: int = 4, width: int = 32) -> dict[str, bytes]:
    """The files of a random one for the tiny model; of another ``width`` it is another model's."""
    shapes = {f"model.layers.{i}.self_attn.q_proj": (width, width) for i in range(2)}
    write_adapter(folder, shapes, seed, r=rank, lora_alpha=8 * rank)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def call(port: int, path: str, body: dict[str, Any] | None = None, method: str = "GET", **headers: str) -> Any:
    """Status, JSON and headers."""
    data = None if body is None else json.dumps(body).encode()
    asked = {"content-type": "application/json", **headers}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, asked, method="POST" if body else method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read()), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read()), error.headers


class Served:
    """A server with a list, and the hub that its adapters come from."""

    def __init__(self, engine: Engine, hub: Hub, file: Path) -> None:
        self.engine, self.hub, self.file = engine, hub, file

    def write(self, *entries: dict[str, str]) -> str:
        """The new list, put in place as a kubelet does, at once; its SHA-256."""
        text = json.dumps({"adapters": entries})
        new = self.file.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self.file)
        return hashlib.sha256(text.encode()).hexdigest()

    def reload(self) -> Any:
        return call(self.engine.management_port, "/v1/adapters/reload", method="POST")

    def states(self) -> dict[str, Any]:
        status, answer, _ = call(self.engine.management_port, "/v1/adapters")
        assert status == 200
        return {one["name"]: one for one in answer["adapters"]}

    def complete(self, model: str, **headers: str) -> Any:
        body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        return call(self.engine.port, "/v1/completions", body, **headers)


def soon(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := what()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("listed")
    repos = {
        "org/one": Repo(adapter(folder / "one", 1), token="secret"),
        "org/two": Repo(adapter(folder / "two", 2)),
        "org/high": Repo(adapter(folder / "high", 3, rank=32)),
        "org/other": Repo(adapter(folder / "other", 4, width=48)),
        "org/pickled": Repo({"adapter_config.json": b"{}", "adapter_model.bin": b"never"}),
    }
    (folder / "credentials").mkdir()
    (folder / "credentials" / "HF_TOKEN").write_text("secret\n")
    with Hub(repos=repos) as hub:
        file = folder / "adapters.json"
        one = {"name": "one", "uri": "hf://org/one"}
        bad = {"name": "bad", "uri": "hf://org/high"}
        file.write_text(json.dumps({"adapters": [bad, one]}))
        flags = (
            "--enable-lora",
            "--max-loras",
            "2",
            "--lora-list",
            str(file),
            "--lora-credentials",
            str(folder / "credentials"),
            "--max-model-len",
            "256",
        )
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "OCTAVO_CACHE": str(folder / "cache")}
        with Engine(folder, *flags, env=environment) as engine:
            yield Served(engine, hub, file)


def test_it_is_ready_with_all_that_can_be_used(served: Served) -> None:
    states = served.states()  # nothing was waited for but /readyz
    assert states["one"]["state"] == "loaded" and states["one"]["served"]
    assert (states["bad"]["state"], states["bad"]["reason"]) == ("failed", "RankTooHigh")
    assert "\n" not in states["bad"]["message"] and "32" in states["bad"]["message"]
    assert served.complete("one")[0] == 200
    cards = {card["id"]: card for card in call(served.engine.port, "/v1/models")[1]["data"]}
    assert cards.keys() == {"tiny", "one"}
    assert (cards["one"]["parent"], cards["one"]["root"]) == ("tiny", "hf://org/one")


def test_changes_of_the_list_are_followed(served: Served) -> None:
    one, two = {"name": "one", "uri": "hf://org/one"}, {"name": "two", "uri": "hf://org/two"}
    digest = served.write(one, two)
    status, answer, _ = served.reload()
    assert status == 200 and answer["listed"] == digest
    soon(lambda: served.states()["two"]["state"] == "loaded")
    before = served.complete("two")[1]["choices"][0]["text"]
    assert before != served.complete("one")[1]["choices"][0]["text"]

    served.write(one, {"name": "two", "uri": "hf://org/one"})  # other weights under the name
    served.reload()
    soon(lambda: served.complete("two")[1]["choices"][0]["text"] != before)
    soon(lambda: served.states()["two"]["uri"] == "hf://org/one" and served.states()["two"]["state"] == "loaded")

    served.write(one)
    served.reload()
    status, answer, headers = served.complete("two")
    assert status == 404 and answer["error"]["code"] == "model_not_found"
    assert headers["x-octavo-missing-adapter"] == "true", "another replica may have it by now"
    _, _, headers = served.complete("two", **{"x-envoy-attempt-count": "2"})
    assert headers["x-octavo-missing-adapter"] is None, "it is asked for elsewhere once"
    assert served.complete("one")[0] == 200


def test_without_being_asked_it_looks_now_and_then(served: Served) -> None:
    served.write({"name": "one", "uri": "hf://org/one"}, {"name": "late", "uri": "hf://org/two"})
    soon(lambda: served.states().get("late", {}).get("state") == "loaded")


def test_broken_ones_say_why_and_harm_nobody(served: Served) -> None:
    good = hashlib.sha256(served.hub.repos["org/two"].files[WEIGHTS]).hexdigest()
    served.write(
        {"name": "one", "uri": "hf://org/one"},
        {"name": "absent", "uri": "hf://org/absent"},
        {"name": "other", "uri": "hf://org/other"},
        {"name": "pickled", "uri": "hf://org/pickled"},
        {"name": "damaged", "uri": "hf://org/two", "digest": f"sha256:{'0' * 64}"},
        {"name": "pinned", "uri": "hf://org/two", "digest": f"sha256:{good}"},
        {"name": "tiny", "uri": "hf://org/two"},
    )
    served.reload()
    soon(lambda: all(one["state"] != "loading" for one in served.states().values()))
    states = served.states()
    assert states["pinned"]["state"] == states["one"]["state"] == "loaded"
    reasons = {name: one["reason"] for name, one in states.items() if one["state"] == "failed"}
    assert reasons == {
        "absent": "DownloadFailed",
        "other": "WrongBase",
        "pickled": "DownloadFailed",
        "damaged": "DownloadFailed",
        "tiny": "NotUsable",
    }
    assert all("\n" not in one.get("message", "") for one in states.values())
    assert not served.hub.sent("/adapter_model.bin")
    assert served.complete("one")[0] == served.complete("tiny")[0] == 200


def test_a_damaged_list_changes_nothing(served: Served) -> None:
    digest = served.write({"name": "one", "uri": "hf://org/one"})
    served.reload()
    served.file.write_text("{")
    status, answer, _ = served.reload()
    assert status == 400 and "lora_list" in answer["error"]["message"] and "\n" not in answer["error"]["message"]
    served.file.unlink()  # a ConfigMap that somebody deletes
    status, answer, _ = served.reload()
    assert status == 200 and answer["listed"] == digest and served.complete("one")[0] == 200


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"adapters": 1}',
        '{"adapters": [1]}',
        '{"adapters": [{"name": "a"}]}',
        "[" * 100_000,
        '{"adapters": [{"name": "a b", "uri": "x"}]}',
        '{"adapters": [{"name": "a", "uri": "x", "digest": 1}]}',
        '{"adapters": [{"name": "a", "uri": "x"}, {"name": "a", "uri": "y"}]}',
    ],
)
def test_invalid_lists_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as found:
        parse_list(text.encode())
    assert str(found.value).startswith("lora_list: ") and "\n" not in str(found.value)


def test_credentials_are_the_files_of_known_names(tmp_path: Path) -> None:
    (tmp_path / "HF_TOKEN").write_text("a\n")
    (tmp_path / "LD_PRELOAD").write_text("evil.so")
    assert read_credentials(tmp_path) == {"HF_TOKEN": "a"}
    assert read_credentials(None) == read_credentials(tmp_path / "none") == {}
    assert parse_list(b'{"adapters": []}') == []
    assert parse_list(b'{"adapters": [{"name": "a", "uri": "x"}]}') == [Entry("a", "x")]
