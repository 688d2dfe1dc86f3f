"""s3:// and gs://: signed as AWS describes it, gone on with after a break, headers alone for a plan."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hub_server import BIG, CONFIG
from support.s3_judge import KEY, SECRET, TOKEN, S3Judge
from support.web_server import Web

from octavo.errors import ModelError
from octavo.fetch import object_store
from octavo.fetch.model_names import check_model_name
from octavo.fetch.object_store import Credentials, https_address, sign
from octavo.fetch.sources import resolve_model
from octavo.fetch.web import fetch_web_headers, fetch_web_model

PIN = f"#sha256={hashlib.sha256(BIG).hexdigest()}"
ODD = "/models/a b+c/ü(1)=x@2.gguf"  # what must be escaped, in which way


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    for name in [n for n in os.environ if "proxy" in n.lower() or n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OCTAVO_HTTP_TOKEN", raising=False)
    files = {"/models/file.gguf": BIG, "/models/tiny/config.json": CONFIG, "/models/tiny/tokenizer.json": b"{}"}
    with Web({**files, "/models/tiny/model.safetensors": BIG}) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server


@pytest.fixture
def keys(store: Web, monkeypatch: pytest.MonkeyPatch) -> S3Judge:
    """The store asks for signatures from now on, and the keys are there."""
    judge = store.judge = S3Judge()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return judge


def fetch(address: str, **options: bool) -> Path:
    return fetch_web_model(address, progress=False, **options)


# The examples of AWS's documentation, "Signature Calculations for the Authorization Header".
EXAMPLE = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")


@pytest.mark.parametrize(
    ("path", "more", "signature"),
    [
        ("test.txt", {"range": "bytes=0-9"}, "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"),
        ("?lifecycle", {}, "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        ("?max-keys=2&prefix=J", {}, "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"),
    ],
)
def test_signatures_of_the_documentation(path: str, more: dict[str, str], signature: str) -> None:
    url = f"https://examplebucket.s3.amazonaws.com/{path}"
    made = sign(url, EXAMPLE, "us-east-1", "20130524T000000Z", more)
    assert made["Authorization"].endswith(f"Signature={signature}")


@pytest.mark.parametrize(
    ("address", "env", "url", "region"),
    [
        ("s3://b-1/a/f.gguf", {}, "https://b-1.s3.us-east-1.amazonaws.com/a/f.gguf", "us-east-1"),
        ("s3://b.c/f.gguf", {"AWS_REGION": "eu-west-1"}, "https://s3.eu-west-1.amazonaws.com/b.c/f.gguf", "eu-west-1"),
        (
            "s3://bucket/m",
            {"AWS_DEFAULT_REGION": "cn-north-1"},
            "https://bucket.s3.cn-north-1.amazonaws.com.cn/m",
            "cn-north-1",
        ),
        ("s3://bucket/m/", {"AWS_ENDPOINT_URL": "http://minio:9000/"}, "http://minio:9000/bucket/m/", "us-east-1"),
        (
            "s3://bucket/m",
            {"AWS_ENDPOINT_URL": "http://a", "AWS_ENDPOINT_URL_S3": "http://b"},
            "http://b/bucket/m",
            "us-east-1",
        ),
        ("gs://bucket/m x", {"AWS_ENDPOINT_URL": "http://a"}, "https://storage.googleapis.com/bucket/m%20x", "auto"),
        (f"s3://bucket/f.gguf{PIN}", {}, f"https://bucket.s3.us-east-1.amazonaws.com/f.gguf{PIN}", "us-east-1"),
    ],
)
def test_a_bucket_s_address_is_found(address: str, env: dict[str, str], url: str, region: str) -> None:
    found, signer = https_address(address, env)
    assert (found, signer.region, signer.credentials) == (url, region, None)


@pytest.mark.parametrize("address", ["s3://bucket", "s3://bucket/", "s3:///key", "s3://Bucket/k", "gs://b/k#sha256=1"])
def test_an_address_that_cannot_be_meant(address: str) -> None:
    with pytest.raises(ModelError, match=r"is not valid; write (s3|gs)://bucket/path/file\.gguf"):
        https_address(address, {})


def test_half_a_key_is_refused_and_not_repeated() -> None:
    with pytest.raises(ModelError, match="AWS_SECRET_ACCESS_KEY is not set"):
        https_address("s3://bucket/m", {"AWS_ACCESS_KEY_ID": "hush"})
    with pytest.raises(ModelError, match="AWS_ENDPOINT_URL must begin with http"):
        https_address("s3://bucket/m", {"AWS_ENDPOINT_URL": "minio:9000"})


def test_a_folder_comes_signed(store: Web, keys: S3Judge) -> None:
    files = resolve_model("s3://models/tiny", progress=False)
    assert {p.name for p in Path(files.directory).glob("[!.]*")} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "fetched.json",
    }
    assert files.model == "s3://models/tiny" and not keys.refused


def test_every_name_of_an_object_is_signed_as_it_is_sent(store: Web, keys: S3Judge) -> None:
    store.files["/models/a%20b%2Bc/%C3%BC%281%29%3Dx%402.gguf"] = BIG
    assert fetch(f"s3:/{ODD}").read_bytes() == BIG


def test_keys_that_expire_come_with_their_token(store: Web, keys: S3Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    keys.token = TOKEN
    with pytest.raises(ModelError, match="may lack access"):
        fetch("s3://models/file.gguf")
    assert keys.refused == "another session"
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    assert fetch(f"s3://models/file.gguf{PIN}").read_bytes() == BIG


def test_a_broken_connection_goes_on_where_it_was_with_a_new_signature(
    store: Web, keys: S3Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signature is good for a quarter of an hour, and a large file takes longer."""
    made: list[str] = []
    original = object_store.sign
    monkeypatch.setattr(object_store, "sign", lambda url, *more: made.append(url) or original(url, *more))
    store.drop_after, store.drops = 300_000, 2
    assert fetch("s3://models/file.gguf").read_bytes() == BIG
    assert store.sent("/models/file.gguf") == len(BIG), "no byte twice"
    assert len(made) == len(store.seen) == 4, "the probe, and each of three answers"


def test_a_public_bucket_needs_no_key_and_gets_no_token(store: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_HTTP_TOKEN", "of another server")
    assert fetch("s3://models/file.gguf").read_bytes() == BIG
    assert {authorization for *_, authorization in store.seen} == {None}


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "AWS_SECRET_ACCESS_KEY",
            "wrong",
            r"s3://models/file\.gguf cannot be read \(HTTP 403\): AWS_ACCESS_KEY_ID and",
        ),
        ("AWS_REGION", "eu-west-1", "may lack access"),
    ],
)
def test_wrong_keys(
    store: Web, keys: S3Judge, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ModelError, match=message) as error:
        fetch("s3://models/file.gguf")
    assert SECRET not in str(error.value) and "wrong" not in str(error.value)


def test_the_error_without_keys_names_them(store: Web) -> None:
    store.judge = S3Judge()
    with pytest.raises(ModelError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a public"):
        fetch("s3://models/tiny")


def test_missing_objects_are_named_in_the_error(store: Web, keys: S3Judge) -> None:
    with pytest.raises(ModelError, match=r"there is no model at s3://models/none \(HTTP 404\) \(a folder needs"):
        fetch("s3://models/none")
    check_model_name("s3://models/none"), check_model_name("gs://models/none")


@pytest.mark.parametrize("name", ["s3://models/tiny", "s3://models/file.gguf"])
def test_headers_come_without_the_weights(store: Web, keys: S3Judge, tmp_path: Path, name: str) -> None:
    """What `octavo plan` reads."""
    if name.endswith(".gguf"):
        pytest.importorskip("gguf")
        store.files["/models/file.gguf"] = _gguf(tmp_path)
    into = tmp_path / "headers"
    into.mkdir()
    found = fetch_web_headers(name, into)
    weights = found if found.is_file() else found / "model.safetensors"
    remote = "/models/" + str(weights.relative_to(into) if found.is_file() else "tiny/model.safetensors")
    whole = store.files[remote]
    assert weights.stat().st_size == len(whole) and weights.stat().st_blocks * 512 < len(whole) / 2
    assert store.sent(remote) < len(whole) / 2


def _gguf(folder: Path) -> bytes:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(folder / "made.gguf", "llama")
    writer.add_tensor("w", np.ones((400, 1000), np.float32))
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()
    return (folder / "made.gguf").read_bytes()
