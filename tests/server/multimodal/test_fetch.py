"""No request makes the server dial what only the server can reach."""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpcore
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.multimodal import fetch as module
from octavo.multimodal.fetch import FetchError, MediaRules, base64_bytes, data_url_bytes, fetch, is_public

PUBLIC = "93.184.216.34"
RULES = MediaRules.of(["pictures.example", "other.example"])
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Network(httpcore.AsyncNetworkBackend):
    """Dials a server of the test instead, and notes what was to be dialled."""

    def __init__(self, port: int = 0) -> None:
        self.port, self.dialled = port, []

    async def connect_tcp(self, host: str, port: int, *args: Any, **kwargs: Any) -> httpcore.AsyncNetworkStream:
        self.dialled.append((host, port))
        return await httpcore.AnyIOBackend().connect_tcp("127.0.0.1", self.port, *args, **kwargs)


def answers(*addresses: str) -> Callable[[str, int], Awaitable[list[str]]]:
    """A name server: one answer after another, the last for ever."""
    left = list(addresses)

    async def resolve(host: str, port: int) -> list[str]:
        return [left.pop(0) if len(left) > 1 else left[0]]

    return resolve


def get(url: str, handler: Handler | None = None, *addresses: str, rules: MediaRules = RULES) -> tuple[bytes, Network]:
    async def run() -> tuple[bytes, Network]:
        network = Network()
        if handler is None:
            return bytes(await fetch(url, rules, answers(*addresses or (PUBLIC,)), network)), network
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        network.port = server.sockets[0].getsockname()[1]
        async with server:
            return bytes(await fetch(url, rules, answers(*addresses or (PUBLIC,)), network)), network

    return asyncio.run(run())


def replying(head: str, body: bytes = b"", seen: list[bytes] | None = None) -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if seen is not None:
            seen.append(request)
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await writer.drain()
        writer.close()

    return handle


REFUSED_URLS = [
    "http://127.0.0.1/a.png",
    "http://localhost/a.png",
    "http://0x7f.1/a.png",
    "http://2130706433/a.png",
    "http://0177.0.0.1/",
    "http://[::1]/a.png",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/",
    "http://169.254.169.254/latest/meta-data/",
    "http://[fd00:ec2::254]/",
    "http://metadata.google.internal/",
    "http://10.0.0.1/",
    "http://192.168.1.1/",
    "http://100.64.0.1/",
    "http://0.0.0.0/",
    "http://[fe80::1%25eth0]/",
    "http://pictures.example@127.0.0.1/",
    "http://user:pass@pictures.example/",
    "http://127.0.0.1#@pictures.example/",
    "http://127.0.0.1\\@pictures.example/",
    "http://pictures.example\\@127.0.0.1/",
    "http://pictures.example.evil.test/",
    "http://evil.test/?pictures.example",
    "http://pictures.example\t.evil.test/",
    "http://pictures。example.evil/",
    "http:///a.png",
    "http://",
    "ftp://pictures.example/a.png",
    "gopher://127.0.0.1:70/",
    "//127.0.0.1/",
    "javascript:1",
    "unix:///var/run/docker.sock",
    "https://127.1/",
    "http://pictures.example:99999/",
    "",
]


@pytest.mark.parametrize("url", REFUSED_URLS)
def test_nothing_is_dialled(url: str) -> None:
    network = Network()
    with pytest.raises(FetchError) as refused:
        asyncio.run(fetch(url, RULES, answers("127.0.0.1"), network))
    assert network.dialled == [] and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.0.9",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fd00:ec2::254",
        "::ffff:10.0.0.1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "::127.0.0.1",
        "ff02::1",
        "2001:db8::1",
        "240.0.0.1",
        "192.0.2.1",
        "not an address",
    ],
)
def test_an_allowed_name_with_an_address_that_is_not_public_is_refused(address: str) -> None:
    network = Network()
    with pytest.raises(FetchError, match="not a public one"):
        asyncio.run(fetch("https://pictures.example/a.png", RULES, answers(address), network))
    assert network.dialled == []


@given(st.ip_addresses(v=4, network="10.0.0.0/8") | st.ip_addresses(v=4, network="127.0.0.0/8"))
def test_every_form_of_a_private_address_is_private(address: Any) -> None:
    forms = [str(address), f"::ffff:{address}", f"64:ff9b::{address}", f"::{address}"]
    assert not any(map(is_public, forms))
    assert is_public(PUBLIC) and is_public("2606:2800:220:1::1")


def test_the_checked_address_is_dialled_under_the_name_of_the_host() -> None:
    seen: list[bytes] = []
    answer = replying("HTTP/1.1 200 OK\r\nContent-Length: 5", b"image", seen)
    data, network = get("http://Pictures.Example:8080/a%20b.png?x=1#top", answer, PUBLIC, "127.0.0.1")
    assert data == b"image" and network.dialled == [(PUBLIC, 8080)]  # asked once: the second answer is not
    assert seen[0].startswith(b"GET /a%20b.png?x=1 HTTP/1.1\r\n")
    assert b"host: pictures.example:8080" in seen[0].lower()
    assert not any(name in seen[0].lower() for name in (b"cookie", b"authorization", b"referer"))


def test_one_private_address_among_public_ones_is_enough() -> None:
    async def both(host: str, port: int) -> list[str]:
        return [PUBLIC, "10.0.0.1"]

    with pytest.raises(FetchError, match="not a public one"):
        asyncio.run(fetch("http://pictures.example/", RULES, both, Network()))


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(status: int) -> None:
    head = f"HTTP/1.1 {status} Moved\r\nLocation: http://127.0.0.1/\r\nContent-Length: 0"
    with pytest.raises(FetchError, match="redirect"):
        get("http://pictures.example/", replying(head))


def test_errors_and_nonsense_of_servers_are_refused() -> None:
    with pytest.raises(FetchError, match="answers 404"):
        get("http://pictures.example/", replying("HTTP/1.1 404 No\r\nContent-Length: 0"))
    with pytest.raises(FetchError, match="connection failed"):
        get("http://pictures.example/", replying("SSH-2.0-OpenSSH"))
    with pytest.raises(FetchError, match="connection failed"):
        get("http://pictures.example/")  # nobody listens


def test_size_and_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    with pytest.raises(FetchError, match="more than"):
        get("http://pictures.example/", replying("HTTP/1.1 200 OK\r\nContent-Length: 5000", b"x" * 5000))
    monkeypatch.setattr(module, "SECONDS", 0.3)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2)
        writer.close()

    with pytest.raises(FetchError, match="did not arrive"):
        get("http://pictures.example/", silent)


def test_nothing_is_fetched_without_allowed_domains() -> None:
    network = Network()
    with pytest.raises(FetchError, match="--allowed-media-domains"):
        asyncio.run(fetch("https://pictures.example/a.png", MediaRules(), answers(PUBLIC), network))
    assert network.dialled == []


def test_files_are_read_below_the_allowed_folder_alone(tmp_path: Path) -> None:
    folder, secret = tmp_path / "pictures", tmp_path / "secret.png"
    folder.mkdir()
    (folder / "a b.png").write_bytes(b"image")
    secret.write_bytes(b"secret")
    (folder / "link.png").symlink_to(secret)
    os.mkfifo(folder / "pipe.png")
    rules = MediaRules.of(folder=str(folder))
    assert bytes(asyncio.run(fetch(f"file://{folder}/a%20b.png", rules))) == b"image"
    assert bytes(asyncio.run(fetch(f"file://localhost{folder}/a b.png", rules))) == b"image"
    for bad in (
        f"file://{secret}",
        f"file://{folder}/../secret.png",
        f"file://{folder}/%2e%2e/secret.png",
        f"file://{folder}",
        f"file://{folder}/link.png",
        f"file://{folder}/pipe.png",
        f"file://{folder}/none.png",
        "file:///etc/passwd",
        f"file://{folder}/a.png%00",
        f"file://evil.test{folder}/a%20b.png",
        "file:a b.png",
        f"file://{tmp_path}/pictures2",
    ):
        with pytest.raises(FetchError, match=r"below the server's|of this machine"):
            asyncio.run(fetch(bad, rules))
    with pytest.raises(FetchError, match="--allowed-local-media-path"):
        asyncio.run(fetch(f"file://{folder}/a%20b.png", MediaRules()))


@given(st.binary(max_size=40), st.data())
def test_base64_is_read_as_python_does(data: bytes, draws: st.DataObject) -> None:
    """Whole, and with letters that do not belong there, that are missing or too many."""
    text = base64.b64encode(data).decode()
    for _ in range(draws.draw(st.integers(0, 2))):
        at, more = (
            draws.draw(st.integers(0, len(text))),
            draws.draw(st.sampled_from(["", "=", "==", "A", "\n", " ", "-", "é"])),
        )
        text = text[:at] + more + text[at + draws.draw(st.integers(0, 2)) :]
    try:
        expected = base64.b64decode(text, validate=True)
    except ValueError:
        with pytest.raises(FetchError, match="not valid base64"):
            base64_bytes(text)
    else:
        assert base64_bytes(text) == expected


@pytest.mark.parametrize("module", ["pybase64", "nothing"])
def test_data_urls_hold_base64(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the faster decoder and without."""
    monkeypatch.setitem(sys.modules, module, None)
    assert data_url_bytes("data:image/png;base64,aW1hZ2U=") == b"image"
    for bad in ("data:image/png,image", "data:image/png;base64", "data:;base64,@@@", "data:;base64,aW1hZ2U"):
        with pytest.raises(FetchError):
            data_url_bytes(bad)
    with pytest.raises(FetchError, match="20 MB"):
        base64_bytes("A" * 27_000_000)
