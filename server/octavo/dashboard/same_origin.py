"""Restrict a page for this machine to requests of a browser that has opened the page itself.

Every page that a browser shows may send requests to 127.0.0.1, and the dashboard lends its visitors the server's key.
Their Origin tells such requests. A page may also let the name it was loaded from point to 127.0.0.1 (DNS rebinding):
its requests have that name as their Host.
"""

from __future__ import annotations

import ipaddress
from typing import Any
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Return whether ``host``, a name or address without a port, is this machine, independent of DNS."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refusal(scope: Any) -> str:
    """Return why an ASGI request on a loopback address is refused; empty if it is not."""
    headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
    host, origin = headers.get(b"host", ""), headers.get(b"origin")
    if not is_loopback(_name(f"//{host}")):
        return (
            f"Host {host!r} is not this machine: open the dashboard as localhost or 127.0.0.1. To reach it by another "
            "name, start it with --host 0.0.0.0: it then asks for the server's API key.\n"
        )
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        return f"Origin {origin!r} is another page than this one, at {host!r}.\n"
    return ""


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
