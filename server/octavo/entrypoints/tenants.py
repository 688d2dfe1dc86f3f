"""Reads the headers of a gateway in front: whom a request is for, and whose cache it may use.

Who reaches the engine beside the gateway can send these headers, too. So they carry secrets: the salt of a cache, and
an id without which a tenant's name is nobody's account. Who makes them up gets a cache, and an account, of their own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from contextvars import ContextVar

from octavo.metrics.stats import Tenant

TENANT_HEADER, ID_HEADER, SALT_HEADER = b"x-octavo-tenant", b"x-octavo-tenant-id", b"x-octavo-cache-salt"
_NAME = re.compile(rb"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_MAX_BYTES = 256  # of an id or a salt

current_tenant: ContextVar[Tenant | None] = ContextVar("current_tenant", default=None)
_salt: ContextVar[str] = ContextVar("cache_salt_header", default="")


def read_headers(headers: Mapping[bytes, bytes]) -> None:
    """Note the tenant and the salt of the request that begins."""
    name, secret = headers.get(TENANT_HEADER, b""), headers.get(ID_HEADER, b"")
    tenant = None
    if _NAME.fullmatch(name) and len(secret) <= _MAX_BYTES:
        # The id itself is not shown to whoever reads metrics.
        tenant = Tenant(name.decode(), hashlib.sha256(secret).hexdigest()[:16] if secret else "")
    current_tenant.set(tenant)
    _salt.set(headers.get(SALT_HEADER, b"").decode("latin-1"))


def act_for(tenant: Tenant | None, salt: str) -> None:
    """Go on as for a request of the tenant, with a ``salt`` of its own."""
    current_tenant.set(tenant)
    _salt.set(salt)


def combined_salt(own: str | None) -> str | None:
    """The salt of the request's prefix cache: the gateway's, and ``own``, which the client's body sets."""
    header = _salt.get()
    if not header:
        return own
    digest = hashlib.sha256(header.encode()).hexdigest()
    return digest if own is None else f"{digest} {own}"
