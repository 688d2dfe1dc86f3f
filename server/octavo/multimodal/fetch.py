"""Bytes of images that requests name by an address: data:, http(s): of allowed domains, file: below an allowed folder.

A host is resolved once, its addresses are checked, and one of these is dialled, so that a name server that answers
differently the next time changes nothing. Redirects are not followed, no credentials are sent.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import os
import re
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable, Iterable, Sized
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.multimodal.pieces import Pieces

if TYPE_CHECKING:
    import httpcore
    import httpx
import ipaddress

_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Return whether an IP address belongs to the public internet: not loopback, private, link-local (metadata
    services), shared, reserved or multicast, nor an IPv6 form of such an IPv4 address."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64 or ip.packed[:12] == bytes(12):  # the latter are IPv4-compatible addresses, long out of use
            inner = ipaddress.IPv4Address(ip.packed[12:])
        if inner is not None:
            ip = inner
    return ip.is_global and not ip.is_multicast and not ip.is_reserved and not ip.is_unspecified


MAX_BYTES = 20_000_000
_PIECE = 1 << 18  # bytes
SECONDS = 10.0

Resolve = Callable[[str, int], Awaitable[list[str]]]  # addresses of a host
_UNPRINTABLE = re.compile(r"[\x00-\x20\x7f\\]")


class FetchError(ValueError):
    """The address is refused, or what it names cannot be had; one line for the client."""


async def _resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


@dataclass(frozen=True)
class MediaRules:
    """``domains``: hosts from which http(s) addresses may be fetched (--allowed-media-domains); ``folder``: below it,
    file: addresses may be read (--allowed-local-media-path)."""

    domains: frozenset[str] = frozenset()
    folder: Path | None = None

    @classmethod
    def of(cls, domains: Iterable[str] = (), folder: str | None = None) -> MediaRules:
        """Build it from the flags."""
        return cls(frozenset(d.lower().rstrip(".") for d in domains), Path(folder).resolve() if folder else None)


def prepare_fetching() -> None:
    """Import what fetching needs and read the certificates that are trusted: both take long."""
    import anyio._backends._asyncio  # noqa: F401
    import httpcore  # noqa: F401
    import httpx  # noqa: F401

    _trusted()


@cache
def _trusted() -> ssl.SSLContext:
    import httpx

    return httpx.create_ssl_context()


async def fetch(
    url: str, rules: MediaRules, resolve: Resolve = _resolve, network: httpcore.AsyncNetworkBackend | None = None
) -> Pieces:
    """The bytes at an address that is no data: one. Raises FetchError. ``resolve`` and ``network`` are what asks for
    addresses and what dials them."""
    scheme = url.partition(":")[0].lower()
    if scheme == "file":
        return Pieces([await asyncio.to_thread(_read_file, url, rules.folder)])
    if scheme not in ("http", "https"):
        raise FetchError("image url must begin with data:, https: or http:" + (", file:" if rules.folder else ""))
    parsed = _parse(url, rules)
    host, port = parsed.raw_host.decode(), parsed.port or (443 if parsed.scheme == "https" else 80)
    try:
        async with asyncio.timeout(SECONDS):
            address = await _checked_address(host, port, resolve)
            return await _get(parsed, host, port, address, network)
    except TimeoutError:
        raise FetchError(
            f"image at {host} did not arrive within {SECONDS:.0f} seconds; send it as a data: url"
        ) from None


def _parse(url: str, rules: MediaRules) -> httpx.URL:
    import httpx

    if not rules.domains:
        raise FetchError(
            "image url is http(s), and this server fetches none (--allowed-media-domains); send it as a data: url"
        )
    if _UNPRINTABLE.search(url):
        raise FetchError("image url has white space, a control character or a backslash; percent-encode it")
    try:
        parsed = httpx.URL(url)
        if (parsed.port or 0) > 65_535:
            raise ValueError("no port")
    except (httpx.InvalidURL, ValueError, TypeError):
        raise FetchError("image url cannot be read; check it") from None
    host = parsed.raw_host.decode().lower().rstrip(".")
    if parsed.userinfo:
        raise FetchError("image url has a user name, and no credentials are sent; drop it")
    if host not in rules.domains:
        raise FetchError(
            f"image url is of {host[:100]!r}, which is not among the server's --allowed-media-domains; send it as a "
            "data: url"
        )
    return parsed


async def _checked_address(host: str, port: int, resolve: Resolve) -> str:
    try:
        addresses = await resolve(host, port)
    except (OSError, UnicodeError):
        addresses = []
    if not addresses:
        raise FetchError(f"image url is of {host}, which has no address; check the name")
    for address in addresses:
        if not is_public(address):
            raise FetchError(f"image url is of {host}, whose address is not a public one; send it as a data: url")
    return addresses[0]


async def _get(
    url: httpx.URL, host: str, port: int, address: str, network: httpcore.AsyncNetworkBackend | None
) -> Pieces:
    import httpcore

    class Dialler(httpcore.AsyncNetworkBackend):
        """Dials the checked address, whatever the host's name; Host and SNI keep the name."""

        def __init__(self) -> None:
            self.inner = network or httpcore.AnyIOBackend()

        async def connect_tcp(self, host: str, port: int, *args: Any, **kwargs: Any) -> httpcore.AsyncNetworkStream:
            return await self.inner.connect_tcp(address, port, *args, **kwargs)

    target = httpcore.URL(scheme=url.scheme, host=url.raw_host, port=port, target=url.raw_path)
    headers = [("Host", url.netloc.decode()), ("Accept", "image/*"), ("Accept-Encoding", "identity")]
    try:
        async with (
            httpcore.AsyncConnectionPool(_trusted(), network_backend=Dialler(), retries=0) as pool,
            pool.stream("GET", target, headers=headers) as response,
        ):
            if 300 <= response.status < 400:
                raise FetchError(f"image at {host} is a redirect, and none is followed; send the final address")
            if response.status != 200:
                raise FetchError(f"image at {host} cannot be had: the server answers {response.status}")
            pieces, data = list[bytes](), bytearray()
            async for received in response.aiter_stream():
                data += received
                if len(pieces) * _PIECE + len(data) > MAX_BYTES:
                    raise FetchError(f"image at {host} has more than {MAX_BYTES // 10**6} MB; send a smaller one")
                while len(data) >= _PIECE:
                    pieces.append(bytes(data[:_PIECE]))
                    del data[:_PIECE]
            return Pieces([*pieces, bytes(data)])
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError, UnicodeError):
        raise FetchError(f"image at {host} cannot be had: the connection failed") from None


def _read_file(url: str, folder: Path | None) -> bytes:
    from urllib.parse import unquote

    if folder is None:
        raise FetchError("image url is file:, and this server reads none (--allowed-local-media-path)")
    path = url[len("file:") :]
    if path.startswith("//"):
        host, slash, path = path[2:].partition("/")
        path = slash + path
        if host not in ("", "localhost"):
            raise FetchError("image url names a host, and file: urls are of this machine; write file:///path")
    refused = FetchError("image url is not a file below the server's --allowed-local-media-path")
    try:
        real = Path(unquote(path)).resolve(strict=True)
        if not real.is_relative_to(folder):
            raise refused
        with open(real, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise refused
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, FetchError):
            raise
        raise refused from None
    if len(data) > MAX_BYTES:
        raise FetchError(f"image has more than {MAX_BYTES // 10**6} MB; send a smaller one")
    return data


def data_url_bytes(url: str) -> bytes:
    """The bytes in a data: url. Raises FetchError."""
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise FetchError("image url is data: without base64; write data:image/png;base64,...")
    return base64_bytes(body)


def check_length(text: Sized) -> None:
    """Raises FetchError for base64, or a data: url, of an image that is too large."""
    if len(text) * 3 // 4 > MAX_BYTES + 100:
        raise FetchError(f"image has more than {MAX_BYTES // 10**6} MB; send a smaller one")


def base64_bytes(text: str) -> bytes:
    """The bytes of an image in base64. Raises FetchError."""
    check_length(text)
    with contextlib.suppress(ImportError, ValueError):  # fifty times as fast, and refuses a "=" too many
        from pybase64 import b64decode

        return b64decode(text, validate=True)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise FetchError("image is not valid base64; encode it again") from None
