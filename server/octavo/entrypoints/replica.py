"""Ids of what one server keeps. They name it, so that routers in front of several find it again. Pure.

The name is a hash of the address at which routers know the server: they need not ask it. `octavo_router/keepers.py`
makes and reads the same names.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
import uuid

from octavo.errors import ConfigError

_TAG_BYTES = 5  # 8 letters and digits
_KEPT = re.compile(r"(?:resp_|conv_|batch_|file-)([a-z2-7]{8})[0-9a-f]{32}")


def tag_of(address: str | None, port: int) -> str:
    """The name of the server at an IP address, or ADDRESS:PORT; `port`: where there is none. Empty: no address is
    given. Raises ConfigError."""
    if not address:
        return ""
    host, own = _split(address)
    port = port if own is None else own
    if not 0 < port <= 65535:
        raise ConfigError(f"replica_address needs a port from 1 to 65535, as ADDRESS:PORT, got {address!r}")
    digest = hashlib.sha256(f"{host} {port}".encode()).digest()
    return base64.b32encode(digest[:_TAG_BYTES]).decode().lower()


def _split(address: str) -> tuple[str, int | None]:
    try:
        return str(ipaddress.ip_address(address)), None
    except ValueError:
        host, _, port = address.rpartition(":")
    try:
        if port.isdecimal() and port.isascii():
            return str(ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))), int(port[:6])
    except ValueError:
        pass
    raise ConfigError(f"replica_address must be an IP address, or ADDRESS:PORT, got {address!r}")


def new_id(prefix: str, tag: str) -> str:
    """A new id that nobody can guess."""
    return f"{prefix}{tag}{uuid.uuid4().hex}"


def elsewhere(kept_id: str, tag: str) -> str:
    """For an error: that another replica than that of the tag keeps this. Empty: none does."""
    found = _KEPT.fullmatch(kept_id)
    if found is None or found[1] == tag:
        return ""
    return (
        "another replica keeps it, which this request did not reach (with routing.strategy prefix routers follow ids, "
        "and a single replica keeps all)"
    )
