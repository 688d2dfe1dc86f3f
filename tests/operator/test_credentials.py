"""Kubeconfigs as clouds hand them out: log-in programs, token files, certificates, and credentials that expire."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import ssl
import stat
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from octavo_operator.autoscaling import certificate
from octavo_operator.kube import credentials
from octavo_operator.kube.client import ApiError, KubeClient
from octavo_operator.kube.credentials import CredentialsError

Json = dict[str, Any]

# A log-in program: each run gives the next token, or a certificate, and leaves a line in a file.
PROGRAM = """
    import json, os, sys, time
    from datetime import UTC, datetime, timedelta
    here = sys.argv[1]
    assert json.loads(os.environ["KUBERNETES_EXEC_INFO"])["kind"] == "ExecCredential"
    assert os.environ["PROFILE"] == "prod"
    time.sleep(0.1)
    with open(f"{here}/runs", "a") as file:
        file.write("run\\n")
    number = len(open(f"{here}/runs").readlines())
    if os.path.exists(f"{here}/broken"):
        print("no network, and the secret is hunter2", file=sys.stderr)
        sys.exit(1)
    status = {"token": f"token-{number}"}
    if os.path.exists(f"{here}/pair.json"):
        status = json.load(open(f"{here}/pair.json"))
    if len(sys.argv) > 2:
        end = datetime.now(UTC) + timedelta(seconds=float(sys.argv[2]))
        status["expirationTimestamp"] = end.strftime("%Y-%m-%dT%H:%M:%SZ")
    print(json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}))
"""


class Server:
    """An API server that takes one token, or clients with a certificate."""

    def __init__(self) -> None:
        self.taken: str | None = None
        self.oldest = 0  # number of the oldest token that is taken
        self.seen: list[str | None] = []
        self.asks_for_certificate: str | None = None  # PEM
        self.port = 0
        self.own = certificate.make(["localhost"], timedelta(hours=1))

    async def _answer(self, request: web.Request) -> web.Response:
        header = request.headers.get("Authorization")
        self.seen.append(header)
        outdated = self.oldest and int((header or "0").rpartition("-")[2]) < self.oldest
        if outdated or (self.taken is not None and header != f"Bearer {self.taken}"):
            return web.json_response({"reason": "Unauthorized", "message": "Unauthorized"}, status=401)
        return web.json_response({"ok": True})

    @asynccontextmanager
    async def running(self, folder: Path) -> Any:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        pair = folder / "server.pem"
        pair.write_bytes(self.own.certificate + self.own.key)
        context.load_cert_chain(pair)
        if self.asks_for_certificate:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=self.asks_for_certificate)
        app = web.Application()
        app.router.add_get("/{tail:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        try:
            yield self
        finally:
            await runner.cleanup()


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def kubeconfig(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Writes one for a user; its server is known once it runs."""
    path = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    def write(user: Json, **cluster: Any) -> Path:
        authority = base64.b64encode(server.own.authority).decode()
        entry = {"server": f"https://localhost:{server.port}", "certificate-authority-data": authority, **cluster}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "x",
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "mine"}}],
            "clusters": [{"name": "c", "cluster": entry}],
            "users": [{"name": "u", "user": user}],
        }
        path.write_text(yaml.safe_dump(config))
        return path

    yield write


def log_in_program(folder: Path, *arguments: str) -> Json:
    script = folder / "log-in"
    script.write_text(f"#!{sys.executable}\n{textwrap.dedent(PROGRAM)}")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": "./log-in",
            "args": [str(folder), *arguments],
            "env": [{"name": "PROFILE", "value": "prod"}],
            "interactiveMode": "Never",
            "provideClusterInfo": True,
        },
    }


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text().splitlines())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "_MIN_INTERVAL_SECONDS", 0.5)


@pytest.mark.usefixtures("quick")
def test_a_token_of_a_program_is_used_until_it_is_refused(
    tmp_path: Path, server: Server, kubeconfig: Any, quick: None
) -> None:
    """A cloud may end a session at any time. However many requests are refused then, the program runs once."""

    async def run() -> None:
        async with server.running(tmp_path):
            kubeconfig(log_in_program(tmp_path))
            cluster = KubeClient.connect()
            assert cluster.namespace == "mine"
            server.taken = "token-1"
            for _ in range(3):
                await cluster.call("GET", "/api")
            assert runs(tmp_path) == 1
            await asyncio.sleep(0.6)
            server.taken = "token-2"
            await asyncio.gather(*(cluster.call("GET", "/api") for _ in range(10)))
            assert runs(tmp_path) == 2
            server.taken, began = "none that anybody has", time.monotonic()
            with pytest.raises(ApiError, match="401"):
                await cluster.call("GET", "/api")
            for _ in range(20):
                with pytest.raises(ApiError, match="401"):
                    await cluster.call("GET", "/api")
            most = 1 + (time.monotonic() - began) / 0.5
            assert runs(tmp_path) - 2 <= most, "one who is refused does not log in all the time"
            await cluster.close()

    asyncio.run(run())


@pytest.mark.usefixtures("quick")
def test_a_token_that_expires_is_replaced_before_it_does(
    tmp_path: Path, server: Server, kubeconfig: Any, quick: None
) -> None:
    """Also for the sessions that kopf was given, in its own thread and event loop."""

    async def ask(cluster: KubeClient) -> int:
        async with cluster.new_session() as session, session.get(f"{cluster.server}/watch") as response:
            return response.status

    async def run() -> None:
        async with server.running(tmp_path):
            kubeconfig(log_in_program(tmp_path, "3"))
            cluster, began = KubeClient.connect(), time.monotonic()
            statuses = []
            for _ in range(12):
                server.oldest = runs(tmp_path)  # on a slow machine a newer one may be due at any moment
                statuses.append(await asyncio.to_thread(lambda: asyncio.run(ask(cluster))))
                await cluster.call("GET", "/api")
                await asyncio.sleep(0.4)
            assert set(statuses) == {200}
            assert 2 <= runs(tmp_path) <= 2 + (time.monotonic() - began) / 1.5
            assert len(set(server.seen)) == runs(tmp_path)
            await cluster.close()

    asyncio.run(run())


def client_certificate() -> tuple[str, str]:
    """One that signed itself, and its key."""
    key, name = (
        ec.generate_private_key(ec.SECP256R1()),
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "operator")]),
    )
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    return made.public_bytes(pem).decode(), key.private_bytes(pem, *form).decode()


def test_a_program_may_give_a_certificate(tmp_path: Path, server: Server, kubeconfig: Any) -> None:
    server.asks_for_certificate, key = client_certificate()
    pair = {"clientCertificateData": server.asks_for_certificate, "clientKeyData": key}
    (tmp_path / "pair.json").write_text(json.dumps(pair))

    async def run() -> None:
        async with server.running(tmp_path):
            kubeconfig(log_in_program(tmp_path))
            cluster = KubeClient.connect()
            assert await cluster.call("GET", "/api") == {"ok": True}
            await cluster.close()

    asyncio.run(run())
    assert server.seen == [None]


@pytest.mark.parametrize("kind", ["token", "tokenFile", "username"])
def test_credentials_in_the_file_itself_are_used(tmp_path: Path, server: Server, kubeconfig: Any, kind: str) -> None:
    (tmp_path / "token").write_text("first\n")
    user = {
        "token": {"token": "first"},
        "tokenFile": {"tokenFile": "token"},
        "username": {"username": "u", "password": "p"},
    }[kind]

    async def run() -> None:
        async with server.running(tmp_path):
            kubeconfig(user)
            cluster = KubeClient.connect()
            await cluster.call("GET", "/api")
            (tmp_path / "token").write_text("second\n")
            cluster._credentials._due = 0.0  # type: ignore[attr-defined]
            await cluster.call("GET", "/api")
            await cluster.close()

    asyncio.run(run())
    basic = f"Basic {base64.b64encode(b'u:p').decode()}"
    expected = {"token": "Bearer first", "tokenFile": "Bearer first", "username": basic}[kind]
    assert server.seen == [expected, "Bearer second" if kind == "tokenFile" else expected]


def test_another_name_of_the_server_may_be_given(tmp_path: Path, server: Server, kubeconfig: Any) -> None:
    """As for an API server behind a tunnel."""

    async def run() -> None:
        async with server.running(tmp_path):
            address = f"https://127.0.0.1:{server.port}"
            kubeconfig({"token": "x"}, server=address)
            cluster = KubeClient.connect()
            with pytest.raises(OSError, match="certificate"):
                await cluster.call("GET", "/api")
            await cluster.close()
            kubeconfig({"token": "x"}, server=address, **{"tls-server-name": "localhost"})
            cluster = KubeClient.connect()
            assert await cluster.call("GET", "/api") == {"ok": True}
            await cluster.close()

    asyncio.run(run())


def test_several_files_are_one_kubeconfig(tmp_path: Path, server: Server, kubeconfig: Any, monkeypatch: Any) -> None:
    async def run() -> None:
        async with server.running(tmp_path):
            path = kubeconfig({"token": "x"})
            config = yaml.safe_load(path.read_text())
            (tmp_path / "users").write_text(yaml.safe_dump({"users": config.pop("users")}))
            path.write_text(yaml.safe_dump(config))
            monkeypatch.setenv(
                "KUBECONFIG", os.pathsep.join([str(path), str(tmp_path / "none"), str(tmp_path / "users")])
            )
            cluster = KubeClient.connect()
            await cluster.call("GET", "/api")
            await cluster.close()

    asyncio.run(run())
    assert server.seen == ["Bearer x"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there is no kubeconfig"),
        ("", "cannot be used"),
        ("[", "cannot be used"),
        ("just text", "cannot be used"),
        ("current-context: y\ncontexts: []\nclusters: []\n", "name y"),
        ("users: [{user: {token: hunter2}}]\ncontexts: []\nclusters: []\ncurrent-context: x\n", "cannot be used"),
    ],
)
def test_a_file_that_makes_no_sense_is_one_line(tmp_path: Path, monkeypatch: Any, text: str | None, words: str) -> None:
    path = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(path))
    if text is not None:
        path.write_text(text)
    with pytest.raises(CredentialsError) as caught:
        credentials.find()
    assert words in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value) and "hunter2" not in str(caught.value)


def test_a_program_that_fails_is_named(tmp_path: Path, kubeconfig: Any) -> None:
    (tmp_path / "broken").touch()
    kubeconfig(log_in_program(tmp_path), server="https://localhost:1")
    with pytest.raises(CredentialsError, match=r"exec plugin \./log-in returned no credentials"):
        credentials.find()


@pytest.mark.usefixtures("quick")
def test_one_that_fails_later_keeps_what_there_was(
    tmp_path: Path, server: Server, kubeconfig: Any, quick: None
) -> None:
    async def run() -> None:
        async with server.running(tmp_path):
            kubeconfig(log_in_program(tmp_path, "2"))
            cluster = KubeClient.connect()
            (tmp_path / "broken").touch()
            for _ in range(4):
                await cluster.call("GET", "/api")
                await asyncio.sleep(0.6)
            (tmp_path / "broken").unlink()
            await asyncio.sleep(0.6)
            await cluster.call("GET", "/api")
            await cluster.close()

    asyncio.run(run())
    assert server.seen[:-1] == ["Bearer token-1"] * 4
    assert server.seen[-1] == f"Bearer token-{runs(tmp_path)}"
