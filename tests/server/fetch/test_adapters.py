"""Fetching LoRA adapters: the two files of PEFT, from every kind of source, and nothing of another digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hub_server import Hub, Repo
from support.web_server import Web

from octavo.cli.main import main
from octavo.errors import ModelError
from octavo.fetch.installed import installed
from octavo.fetch.lora import FILES, fetch_adapter

CONFIG, WEIGHTS = b'{"r": 1}', b"w" * 20_000
CONTENT = dict(zip(FILES, (CONFIG, WEIGHTS), strict=True))
DIGEST = f"sha256:{hashlib.sha256(WEIGHTS).hexdigest()}"
OTHER = f"sha256:{'0' * 64}"


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    more = {"README.md": b"never", "adapter_model.bin": b"never", "training_args.bin": b"never"}
    repos = {"org/sql": Repo({**CONTENT, **more}), "org/old": Repo({FILES[0]: CONFIG, "adapter_model.bin": b"never"})}
    with Hub(repos=repos) as one:
        monkeypatch.setenv("HF_ENDPOINT", one.url)
        yield one


def content(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def test_two_files_of_a_hub_and_no_more_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch_adapter("hf://org/sql", digest=DIGEST, progress=False)
    assert content(folder) == CONTENT
    assert not [one for one in hub.seen if one.path.endswith((".md", ".bin")) and one.sent]
    asked = len(hub.seen)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch_adapter("hf://org/sql", progress=False) == folder and len(hub.seen) == asked
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        fetch_adapter("hf://org/other", progress=False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert fetch_adapter("hf://org/sql", revision=hub.repos["org/sql"].commit, progress=False) == folder


def test_a_folder_of_the_web_by_its_digest(tmp_path: Path) -> None:
    with Web({f"/a/{name}": data for name, data in CONTENT.items()}) as web:
        first = fetch_adapter(f"{web.url}/a", digest=DIGEST, progress=False)
        assert content(first) == CONTENT and fetch_adapter(f"{web.url}/a/", digest=DIGEST, progress=False) == first
        assert installed() == [], "it is no model, which could be evicted while it is served"
        with pytest.raises(ModelError, match=f"expected {OTHER}"):
            fetch_adapter(f"{web.url}/a", digest=OTHER, progress=False)
        web.files[f"/a/{FILES[1]}"] = b"new"
        new = f"sha256:{hashlib.sha256(b'new').hexdigest()}"
        second = fetch_adapter(f"{web.url}/a", digest=new, progress=False)
        assert content(second)[FILES[1]] == b"new" and content(first) == CONTENT, "whoever serves it may read it again"
        web.files[f"/a/{FILES[1]}"] = b"zeros"  # what did not fit is fetched again, not taken for good
        with pytest.raises(ModelError, match="expected"):
            fetch_adapter(f"{web.url}/a", digest=OTHER, progress=False)
        assert web.sent(f"/a/{FILES[1]}") == 2 * len(WEIGHTS) + len(b"new") + len(b"zeros")


@pytest.mark.parametrize(
    ("uri", "more", "says"),
    [
        ("hf://org/none", {}, "there is no model"),
        ("hf://org/old", {}, "has no adapter_model.safetensors"),
        ("hf://name/../x", {}, "name"),
        ("ftp://host/a", {}, "unknown source"),
        ("/nowhere", {}, "has no adapter_config.json"),
        ("/nowhere", {"revision": "main"}, "revision"),
        ("hf://org/sql", {"digest": "abc"}, "64 hex digits"),
        ("hf://org/sql", {"digest": OTHER}, "expected"),
        ("https://host/a.gguf", {}, "is one file"),
    ],
)
def test_an_unavailable_adapter_is_refused_in_one_line(hub: Hub, uri: str, more: dict[str, str], says: str) -> None:
    with pytest.raises(ModelError, match=says) as found:
        fetch_adapter(uri, progress=False, **more)
    assert "\n" not in str(found.value)


def test_the_command_prints_where_it_is(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "--adapter", "hf://org/sql", "--quiet", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert content(Path(said["directory"])) == CONTENT
    assert main(["fetch", "--adapter", str(tmp_path), "--quiet"]) == 1
    assert capsys.readouterr().err.startswith("octavo: error: ")
    assert main(["fetch", "hf://org/sql", "--digest", DIGEST]) == 1
