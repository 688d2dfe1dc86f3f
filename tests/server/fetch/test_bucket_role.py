"""Buckets read by roles: each source of credentials as the clouds' own services answer it, over HTTP on loopback."""

from __future__ import annotations

import json
import os
import ssl
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from support.hub_server import BIG, CONFIG
from support.s3_judge import KEY, SECRET, TOKEN, S3Judge
from support.web_server import Web

from octavo.errors import ModelError
from octavo.fetch.sources import resolve_model
from octavo.fetch.web import fetch_web_headers, fetch_web_model

ODD = "models/a b+c/ü(1)=x@2.gguf"
EXPIRES = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")


class Credentials:
    """Amazon's STS, its credentials of a container, and Google's metadata server, whichever is asked for."""

    def __init__(self, certificate: Path | None = None) -> None:
        credentials = self
        self.asked: list[str] = []
        self.has_role = True

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.do_GET()

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                credentials.asked.append(path)
                if not credentials.has_role:
                    body, status = b"", 404
                elif path.startswith("/computeMetadata"):
                    right = self.headers.get("Metadata-Flavor") == "Google"
                    body, status = (
                        json.dumps({"access_token": TOKEN, "expires_in": 3600}).encode(),
                        200 if right else 403,
                    )
                elif path == "/container":
                    right = self.headers.get("Authorization") == "of the pod"
                    keys = {"AccessKeyId": KEY, "SecretAccessKey": SECRET, "Token": TOKEN, "Expiration": EXPIRES}
                    body, status = json.dumps(keys).encode(), 200 if right else 403
                else:
                    keys = {
                        "AccessKeyId": KEY,
                        "SecretAccessKey": SECRET,
                        "SessionToken": TOKEN,
                        "Expiration": EXPIRES,
                    }
                    inner = "".join(f"<{name}>{value}</{name}>" for name, value in keys.items())
                    body, status = (
                        (
                            "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>"
                            f"{inner}</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
                        ).encode(),
                        200,
                    )
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{port}"
        if certificate is not None:  # Amazon's STS is asked over TLS alone
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
            self.url = f"https://localhost:{port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """An authority, and a certificate of it for localhost with its key."""
    keys = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("authority", "localhost")]
    now, made = datetime.now(UTC), []
    for name, key, is_authority in zip(names, keys, (True, False), strict=True):
        made.append(
            x509.CertificateBuilder(names[0], name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .sign(keys[0], hashes.SHA256())
            .public_bytes(Encoding.PEM)
        )
    private = keys[1].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "authority.pem").write_bytes(made[0])
    (folder / "localhost.pem").write_bytes(made[1] + private)
    return folder / "authority.pem", folder / "localhost.pem"


@pytest.fixture
def credentials(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Credentials]:
    certificate = None
    if getattr(request, "param", "irsa") == "irsa":
        authority, certificate = make_certificate(tmp_path)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    made = Credentials(certificate)
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    for name in [n for n in os.environ if "proxy" in n.lower() or n.startswith(("AWS_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OCTAVO_HTTP_TOKEN", raising=False)
    files = {"/models/file.gguf": BIG, "/models/tiny/config.json": CONFIG, "/models/tiny/tokenizer.json": b"{}"}
    with Web({**files, "/models/tiny/model.safetensors": BIG}) as server:
        server.judge = S3Judge(token=TOKEN)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server


def set_role(kind: str, credentials: Credentials, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = folder / "token"
    token.write_text("of the pod")
    if kind == "irsa":
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/models")
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", credentials.url)
    else:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{credentials.url}/container")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(token))


@pytest.mark.parametrize(
    ("kind", "credentials"), [("irsa", "irsa"), ("pod identity", "plain")], indirect=["credentials"]
)
def test_a_role_reads_files_folders_and_headers(
    kind: str, store: Web, credentials: Credentials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_role(kind, credentials, tmp_path, monkeypatch)
    store.files[f"/{ODD}".replace(" ", "%20").replace("+", "%2B").replace("ü(1)=x@", "%C3%BC%281%29%3Dx%40")] = BIG
    assert fetch_web_model("s3://models/file.gguf", progress=False).read_bytes() == BIG
    assert fetch_web_model(f"s3://{ODD}", progress=False).read_bytes() == BIG
    files = resolve_model("s3://models/tiny", progress=False)
    assert {p.name for p in Path(files.directory).glob("[!.]*")} >= {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    assert credentials.asked and {authorization for *_, authorization in store.seen if not authorization} == set()


def test_a_break_goes_on_where_it_was(
    store: Web, credentials: Credentials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_role("irsa", credentials, tmp_path, monkeypatch)
    store.drop_after, store.drops = len(BIG) // 3, 2
    assert fetch_web_model("s3://models/file.gguf", progress=False).read_bytes() == BIG
    assert store.drops == 0


def test_a_role_without_access_is_said(
    store: Web, credentials: Credentials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_role("irsa", credentials, tmp_path, monkeypatch)
    store.judge = S3Judge(token="of another role")
    with pytest.raises(ModelError, match=r"s3://models/file.gguf cannot be read \(HTTP 403\)") as error:
        fetch_web_model("s3://models/file.gguf", progress=False)
    assert SECRET not in str(error.value) and TOKEN not in str(error.value)
    with pytest.raises(ModelError, match="there is no model at s3://models/none"):
        store.judge = S3Judge(token=TOKEN)
        fetch_web_model("s3://models/none", progress=False)


def test_the_error_without_the_library_names_it(
    store: Web, credentials: Credentials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    set_role("irsa", credentials, tmp_path, monkeypatch)
    with pytest.raises(ModelError, match=r"AWS_WEB_IDENTITY_TOKEN_FILE .* install octavo\[buckets\]"):
        fetch_web_model("s3://models/file.gguf", progress=False)


PLAIN = pytest.mark.parametrize("credentials", ["plain"], indirect=True)


@pytest.fixture
def google(store: Web, credentials: Credentials, monkeypatch: pytest.MonkeyPatch) -> Web:
    store.judge, store.token = None, TOKEN
    store.files["/models/file%2Egguf"] = BIG  # as the library writes it, which is the same name
    monkeypatch.setattr("octavo.fetch.object_store._GOOGLE", store.url)
    monkeypatch.setenv("GOOGLE_BASE_URL", store.url)
    monkeypatch.setenv("GCE_METADATA_HOST", credentials.url.removeprefix("http://"))
    return store


@PLAIN
def test_workload_identity_reads_what_the_public_may_not(google: Web, credentials: Credentials, tmp_path: Path) -> None:
    assert fetch_web_model("gs://models/file.gguf", progress=False).read_bytes() == BIG
    assert any(path.startswith("/computeMetadata") for path in credentials.asked)
    with pytest.raises(ModelError, match="is no GGUF file"):  # its first bytes have been read
        fetch_web_headers("gs://models/file.gguf", tmp_path)


@PLAIN
def test_a_machine_without_a_role_hears_how_to_give_keys(google: Web, credentials: Credentials) -> None:
    credentials.has_role = False
    with pytest.raises(ModelError, match=r"HTTP 401\): set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        fetch_web_model("gs://models/file.gguf", progress=False)


@PLAIN
def test_a_public_bucket_asks_for_no_role(google: Web, credentials: Credentials) -> None:
    google.token = None
    assert fetch_web_model("gs://models/file.gguf", progress=False).read_bytes() == BIG
    assert not credentials.asked and {authorization for *_, authorization in google.seen} == {None}
