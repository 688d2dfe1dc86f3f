"""external.metrics.k8s.io as the operator serves it: real TLS, who is believed, and whose the APIService is."""

from __future__ import annotations

import asyncio
import json
import ssl
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.llmd import store_of

from octavo_operator.autoscaling import API_SERVICE, certificate
from octavo_operator.autoscaling.front_proxy import FrontProxy, FrontProxyConfigError
from octavo_operator.autoscaling.load_reader import LoadReader
from octavo_operator.autoscaling.metrics_api import InvalidSelectorError, MetricsApi, parse_selector
from octavo_operator.autoscaling.registration import plan_registration
from octavo_operator.kube.store import Store

# TLS, as the aggregation layer does it.

NAME = "metrics.system.svc"


def authority(name: str = "front") -> certificate.ServingCertificate:
    return certificate.make([name], timedelta(hours=1))


def front_proxy(one: certificate.ServingCertificate, allowed: tuple[str, ...] = ("proxy",)) -> FrontProxy:
    lists = {"allowed-names": allowed, "username-headers": ["X-Remote-User"], "group-headers": ["X-Remote-Group"]}
    data = {f"requestheader-{key}": json.dumps(value) for key, value in lists.items()}
    data["requestheader-extra-headers-prefix"] = '["X-Remote-Extra-"]'
    return FrontProxy.of({"data": {"requestheader-client-ca-file": one.authority.decode(), **data}})


class FakeReviews:
    """Instead of an API server: who is allowed what. (The real one judges in test_autoscaling_on_cluster.py.)"""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def call(self, method: str, path: str, body: Any, timeout: float) -> Any:
        self.asked.append(body["spec"])
        return {"status": {"allowed": body["spec"]["user"] == "hpa"}}


def client_context(
    server: certificate.ServingCertificate, client: certificate.ServingCertificate | None
) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=server.authority.decode())
    if client:
        with tempfile.TemporaryDirectory() as folder:
            pair = Path(folder, "pair")
            pair.write_bytes(client.certificate + client.key)
            context.load_cert_chain(pair)
    return context


async def ask(port: int, context: ssl.SSLContext, path: str, **headers: str) -> tuple[int, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=NAME)
    lines = [f"GET {path} HTTP/1.1", f"Host: {NAME}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(body)


@pytest.fixture
def proxy_client() -> certificate.ServingCertificate:
    """A client certificate needs its use: make one by hand."""
    return client_certificate("proxy")


def client_certificate(name: str) -> certificate.ServingCertificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    now = datetime.now(UTC)

    def build(subject: str, key: Any, ca: bool) -> Any:
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "front CA")]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        return (builder if ca else builder.add_extension(usage, critical=False)).sign(keys[0], hashes.SHA256())

    pem = serialization.Encoding.PEM
    private = keys[1].private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    ca, leaf = build("front CA", keys[0], True), build(name, keys[1], False)
    return certificate.ServingCertificate(leaf.public_bytes(pem), private, ca.public_bytes(pem), now, now)


ROOT = "/apis/external.metrics.k8s.io/v1beta1"
VALUES = f"{ROOT}/namespaces/default/octavo_queue_depth"


async def serving(store: Store, reviews: FakeReviews, *presented: Any) -> tuple[MetricsApi, int]:
    leading = asyncio.Event()
    leading.set()
    api = MetricsApi(reviews, store, LoadReader(store, lambda _: None), leading)  # type: ignore[arg-type]
    api.use_certificate(*presented)
    return api, await api.listen(0, "127.0.0.1")


def test_only_the_front_proxy_is_believed(proxy_client: certificate.ServingCertificate) -> None:
    async def run() -> None:
        server, reviews = certificate.make([NAME], timedelta(hours=1)), FakeReviews()
        api, port = await serving(store_of(), reviews, server, front_proxy(proxy_client))
        good = client_context(server, proxy_client)
        code, body = await ask(port, good, ROOT, X_Remote_User="anybody")
        assert (code, body["resources"][0]["name"]) == (200, "octavo_queue_depth")
        code, body = await ask(port, good, VALUES, X_Remote_User="hpa", X_Remote_Group="g", X_Remote_Extra_Scopes="s")
        assert (code, body["items"][0]["value"]) == (200, "4"), "no pod is there: one replica is kept"
        assert reviews.asked[0]["groups"] == ["g"]
        assert reviews.asked[0]["extra"] == {"scopes": ["s"]}
        assert reviews.asked[0]["resourceAttributes"]["resource"] == "octavo_queue_depth"
        code, body = await ask(port, good, VALUES, X_Remote_User="eve")
        assert (code, body["kind"], body["reason"]) == (403, "Status", "Forbidden")
        assert (await ask(port, good, VALUES))[0] == 401, "no user"
        assert (await ask(port, client_context(server, None), VALUES, X_Remote_User="hpa"))[0] == 401, "no certificate"
        stranger = client_context(server, client_certificate("proxy"))
        with pytest.raises((ssl.SSLError, ConnectionError, IndexError)):
            await ask(port, stranger, VALUES, X_Remote_User="hpa")
        api.use_certificate(server, front_proxy(proxy_client, ("another",)))
        assert (await ask(port, good, VALUES, X_Remote_User="hpa"))[0] == 401, "signed, but not by that name"
        api.use_certificate(server, front_proxy(proxy_client, ()))
        assert (await ask(port, good, VALUES, X_Remote_User="hpa"))[0] == 200, "any name"
        await api.close()

    asyncio.run(run())


def test_certificates_and_trust_are_exchanged_under_way(proxy_client: certificate.ServingCertificate) -> None:
    async def run() -> None:
        server, later, other = (
            *(certificate.make([NAME], timedelta(hours=1)) for _ in range(2)),
            client_certificate("proxy"),
        )
        api, port = await serving(store_of(), FakeReviews(), server, front_proxy(proxy_client))
        assert (await ask(port, client_context(server, proxy_client), ROOT, X_Remote_User="a"))[0] == 200
        api.use_certificate(later, front_proxy(other))
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(port, client_context(server, other), ROOT, X_Remote_User="a")
        assert (await ask(port, client_context(later, other), ROOT, X_Remote_User="a"))[0] == 200
        with pytest.raises((ssl.SSLError, ConnectionError, IndexError)):
            await ask(port, client_context(later, proxy_client), ROOT, X_Remote_User="a")
        await api.close()

    asyncio.run(run())


def test_a_connection_of_before_the_trust_changed_is_not_believed(proxy_client: certificate.ServingCertificate) -> None:
    async def run() -> None:
        server = certificate.make([NAME], timedelta(hours=1))
        api, port = await serving(store_of(), FakeReviews(), server, front_proxy(proxy_client))
        context = client_context(server, proxy_client)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=NAME)
        request = f"GET {ROOT} HTTP/1.1\r\nHost: {NAME}\r\nX-Remote-User: a\r\n\r\n".encode()
        writer.write(request)
        assert b" 200 " in await reader.readline()
        await reader.readuntil(b"]}")
        api.use_certificate(server, front_proxy(client_certificate("proxy")))
        writer.write(request)
        assert b" 401 " in await reader.readline()
        writer.close()
        await api.close()

    asyncio.run(run())


def test_a_cluster_without_front_proxy_is_named() -> None:
    for nothing in (None, {}, {"data": {"requestheader-allowed-names": "[]"}}):
        with pytest.raises(FrontProxyConfigError, match="requestheader-client-ca-file"):
            FrontProxy.of(nothing)
    with pytest.raises(FrontProxyConfigError, match="allowed-names"):
        FrontProxy.of(
            {"data": {"requestheader-client-ca-file": "BEGIN CERTIFICATE", "requestheader-allowed-names": "{"}}
        )


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("", {"a", "b"}),
        ("octavo.dev/llmdeployment=a", {"a"}),
        ("octavo.dev/llmdeployment == a", {"a"}),
        ("octavo.dev/llmdeployment in (a, b)", {"a", "b"}),
        ("octavo.dev/llmdeployment in (a,b),octavo.dev/llmdeployment=b", {"b"}),
        ("octavo.dev/llmdeployment=c", set()),
    ],
)
def test_selectors(selector: str, names: set[str]) -> None:
    fits = parse_selector(selector)
    assert {name for name in ("a", "b") if fits(name)} == names


@pytest.mark.parametrize("selector", ["other=a", "octavo.dev/llmdeployment!=a", "octavo.dev/llmdeployment", "!x"])
def test_selectors_of_other_labels_are_refused(selector: str) -> None:
    with pytest.raises(InvalidSelectorError):
        parse_selector(selector)


# The APIService.

SERVICE = {"namespace": "system", "name": "ours", "port": 443}


def api_service(name: str = "ours", bundle: str = "b") -> Any:
    ownership_of = plan_registration(None, True, {**SERVICE, "name": name}, bundle, None)
    assert ownership_of.write
    return {**ownership_of.write, "metadata": {**ownership_of.write["metadata"], "uid": "u", "resourceVersion": "7"}}


def test_the_apiservice_is_made_kept_in_step_and_taken_back() -> None:
    live = api_service()
    assert live["metadata"]["name"] == API_SERVICE
    assert plan_registration(live, True, SERVICE, "b", None).write is None
    renewed = plan_registration(live, True, SERVICE, "c", None).write
    assert renewed
    assert (renewed["spec"]["caBundle"], renewed["metadata"]["resourceVersion"]) == ("c", "7")
    assert plan_registration(live, False, SERVICE, "", None).delete
    assert not plan_registration(None, False, SERVICE, "", None).delete


@pytest.mark.parametrize("wanted", [True, False])
def test_an_apiservice_of_others_is_never_touched(wanted: bool) -> None:
    ownership_of = plan_registration(api_service("keda-operator-metrics-apiserver"), wanted, SERVICE, "b", None)
    assert (ownership_of.write, ownership_of.delete) == (None, False)
    if wanted:
        assert ownership_of.problem
        assert ownership_of.problem.reason == "APIServiceConflict"
        assert "system/keda-operator-metrics-apiserver" in ownership_of.problem.message
