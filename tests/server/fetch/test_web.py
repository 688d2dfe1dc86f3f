"""Models from addresses of the web: a file or a folder, gone on with after a break, never a mixture of two versions."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from support.fetch_process import run_fetch
from support.hub_server import BIG, CONFIG
from support.web_server import Web

from octavo.errors import ModelError
from octavo.fetch.sources import resolve_model
from octavo.fetch.web import WebAddress, fetch_web_model

NEW = bytes(reversed(BIG))


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    for name in [n for n in os.environ if "proxy" in n.lower()]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OCTAVO_HTTP_TOKEN", raising=False)
    files = {"/m/file.gguf": BIG, "/m/folder/config.json": CONFIG, "/m/folder/tokenizer.json": b"{}"}
    with Web({**files, "/m/folder/model.safetensors": BIG}) as server:
        yield server


def fetch(web: Web, path: str = "/m/file.gguf", **options: bool) -> Path:
    return fetch_web_model(web.url + path, progress=False, **options)


def test_a_file_comes_once(web: Web) -> None:
    path = fetch(web)
    assert path.name == "file.gguf" and path.read_bytes() == BIG
    asked = len(web.seen)
    assert fetch(web) == path
    assert len(web.seen) == asked


def test_any_part_of_a_model_brings_all(web: Web) -> None:
    parts = {f"m-Q8_0-0000{i}-of-00003.gguf": BIG + bytes([i]) for i in (1, 2, 3)}
    web.files = {f"/m/{name}": data for name, data in parts.items()}
    for name in ("m-Q8_0-00001-of-00003.gguf", "m-Q8_0-00003-of-00003.gguf"):
        path = fetch(web, f"/m/{name}")
        assert path.name == "m-Q8_0-00001-of-00003.gguf"
        assert {file.name: file.read_bytes() for file in path.parent.glob("*.gguf")} == parts
    with pytest.raises(ModelError, match="pins a single"):
        WebAddress.parse(f"{web.url}/m/{name}#sha256={'0' * 64}")
    del web.files["/m/m-Q8_0-00002-of-00003.gguf"]
    with pytest.raises(ModelError, match="there is no model at"):
        fetch(web, "/m/m-Q8_0-00002-of-00003.gguf")


def test_a_folder_comes_with_the_names_that_a_model_has(web: Web) -> None:
    files = resolve_model(f"{web.url}/m/folder/", progress=False)
    assert {p.name for p in Path(files.directory).glob("[!.]*")} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "fetched.json",
    }
    assert files.model == f"{web.url}/m/folder/" and files.format == "safetensors"


def test_shards_come_by_their_index(web: Web) -> None:
    shards = {"a.safetensors": save({"x": torch.ones(4)}), "b.safetensors": save({"y": torch.ones(4)})}
    index = json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}).encode()
    web.files = {f"/s/{name}": data for name, data in {**shards, "config.json": CONFIG}.items()}
    web.files["/s/model.safetensors.index.json"] = index
    folder = fetch(web, "/s", need_weights=False)
    assert not list(folder.glob("*.safetensors"))
    assert {p.name for p in fetch(web, "/s").glob("*.safetensors")} == set(shards)


def test_weights_of_an_unknown_architecture_are_not_fetched(web: Web) -> None:
    web.files = {"/m/config.json": b'{"architectures": ["MambaForCausalLM"]}', "/m/model.safetensors": BIG}
    with pytest.raises(ModelError, match="MambaForCausalLM"):
        fetch(web, "/m")
    assert not web.sent("/m/model.safetensors")


def test_a_broken_connection_goes_on_where_it_was(web: Web) -> None:
    web.drop_after, web.drops = 300_000, 2
    assert fetch(web).read_bytes() == BIG
    assert web.sent("/m/file.gguf") == len(BIG), "no byte twice"


def test_a_file_that_changes_meanwhile_comes_whole(web: Web) -> None:
    web.drop_after, web.drops, web.change_after_drop = 300_000, 1, NEW
    assert fetch(web).read_bytes() == NEW


def test_a_killed_fetch_is_gone_on_with_by_the_next(web: Web, tmp_path: Path) -> None:
    code, _, said = run_fetch(f"{web.url}/m/file.gguf", "--quiet", file_limit=400_000)
    assert code == 1 and "no space left" in said
    before = web.sent("/m/file.gguf")
    assert fetch(web).read_bytes() == BIG
    assert web.sent("/m/file.gguf") - before <= len(BIG) - 400_000
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_the_rest_of_an_old_version_is_not_put_before_a_new_one(web: Web) -> None:
    run_fetch(f"{web.url}/m/file.gguf", "--quiet", file_limit=400_000)
    web.files["/m/file.gguf"] = NEW
    assert fetch(web).read_bytes() == NEW


def test_a_server_without_ranges(web: Web) -> None:
    web.ranges, web.drop_after, web.drops = False, 300_000, 1
    assert fetch(web).read_bytes() == BIG


def test_refresh_fetches_only_what_has_changed(web: Web) -> None:
    folder = fetch(web, "/m/folder")
    before = web.sent("/m/folder/model.safetensors")
    web.files["/m/folder/tokenizer.json"] = b'{"new": 1}'
    assert fetch(web, "/m/folder", refresh=True) == folder
    assert (folder / "tokenizer.json").read_bytes() == b'{"new": 1}'
    assert web.sent("/m/folder/model.safetensors") == before


def test_a_pinned_file_must_be_that_file(web: Web, tmp_path: Path) -> None:
    assert fetch(web, f"/m/file.gguf#sha256={hashlib.sha256(BIG).hexdigest()}").read_bytes() == BIG
    with pytest.raises(ModelError, match=f"has sha256 .*, expected {'0' * 64}"):
        fetch(web, f"/m/file.gguf#sha256={'0' * 64}")
    assert len(list((tmp_path / "cache").rglob("*.gguf"))) == 1


def test_a_token_goes_to_the_server_and_nothing_secret_is_shown(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    web.token = "s3cret"
    with pytest.raises(ModelError, match=r"cannot be read \(HTTP 401\): set OCTAVO_HTTP_TOKEN") as error:
        fetch(web, "/m/file.gguf?signature=hush")
    assert "hush" not in str(error.value)
    monkeypatch.setenv("OCTAVO_HTTP_TOKEN", "s3cret")
    assert fetch(web, "/m/file.gguf?signature=hush").read_bytes() == BIG


def test_a_store_that_hides_what_is_absent(web: Web) -> None:
    web.absent = 403
    assert (fetch(web, "/m/folder") / "model.safetensors").read_bytes() == BIG


def test_a_page_is_no_model(web: Web) -> None:
    web.files["/m/file.gguf"] = b"\n<!DOCTYPE html><title>Log in</title>"
    with pytest.raises(ModelError, match=r"file\.gguf is a web page, not a model"):
        fetch(web)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/m/none.gguf", r"there is no model at .*none\.gguf \(HTTP 404\): check the address"),
        ("/m/none", r"HTTP 404\) \(a folder needs config\.json and model\.safetensors"),
    ],
)
def test_missing_files_are_named_in_the_error(web: Web, path: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        fetch(web, path)


@pytest.mark.parametrize(
    "address",
    ["https://", "https://host", "https://host/", "https://host:x/f.gguf", "https://h/f.gguf#sha256=1", "https:///f"],
)
def test_an_address_that_cannot_be_meant(address: str) -> None:
    with pytest.raises(ModelError, match="is not valid; write https://"):
        WebAddress.parse(address)


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(ModelError, match="OCTAVO_HTTP_TOKEN") as error:
        WebAddress.parse("https://me:hush@host/f.gguf")
    assert "hush" not in str(error.value)


def test_nobody_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"cannot fetch http://127\.0\.0\.1:9/f\.gguf: Connection refused"):
        fetch_web_model("http://127.0.0.1:9/f.gguf", progress=False)


def test_a_fetched_model_serves_while_its_host_is_away(web: Web) -> None:
    path = fetch(web)
    web.__exit__()
    assert fetch(web, refresh=True) == path
    web.__enter__()
