"""Credentials for the API server: in a pod its service account, elsewhere a kubeconfig; renewed before they expire.

Kubeconfigs are read by the `kubernetes` package (exec plugins, OIDC, token files, merged files). In a pod it is not
imported: it would take a quarter of the operator's memory to read two files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import ssl
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

logger = logging.getLogger("octavo.operator.credentials")

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_REREAD_SECONDS = 60.0  # of files that others replace
_MIN_INTERVAL_SECONDS = 5.0  # between two renewals, however often a request gets a 401
_EARLY_SECONDS = 60.0  # before credentials of an exec plugin expire


class CredentialsError(Exception):
    """No usable credentials; the message says where they were looked for."""


class Tls(ssl.SSLContext):
    """A client context. `server_name`: name that the certificate must have, instead of the URL's host."""

    server_name: str | None = None

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Do as SSLContext does, with `server_name`."""
        return super().wrap_bio(incoming, outgoing, server_side, self.server_name or server_hostname, session)


def tls(authority: str | None = None, verify: bool = True, server_name: str | None = None) -> Tls:
    """A client context. `authority`: file of certificates to trust; None: the caller loads them."""
    out = Tls(ssl.PROTOCOL_TLS_CLIENT)
    out.server_name = server_name
    if not verify:
        out.check_hostname, out.verify_mode = False, ssl.CERT_NONE
    elif authority:
        out.load_verify_locations(authority)
    return out


@dataclass
class Credentials:
    """Thread-safe. `authorization`: the header of that name, or None; `tls` may hold a client certificate."""

    server: str
    namespace: str
    tls: Tls
    proxy: str | None = None
    authorization: str | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def is_due(self) -> bool:
        """True if to call `renew` before the next request."""
        return False

    def renew(self, used: str | None = None) -> bool:
        """Blocks. `used`: the authorization that got a 401. False: there is no other one."""
        return False


class _RenewedCredentials(Credentials):
    """Renewed before they expire, by one thread at a time."""

    _due: float | None = None  # time.monotonic(); None: only after a 401
    _renewed_at = -_MIN_INTERVAL_SECONDS

    def is_due(self) -> bool:
        return self._due is not None and time.monotonic() >= self._due

    def renew(self, used: str | None = None) -> bool:
        with self._lock:
            if time.monotonic() < self._renewed_at + _MIN_INTERVAL_SECONDS:
                return used is not None and used != self.authorization
            try:
                lifetime = self._load()
            except (CredentialsError, OSError, ValueError) as error:
                logger.warning("renewing the credentials failed: %s", error)
                lifetime = _MIN_INTERVAL_SECONDS
            self._renewed_at = time.monotonic()
            self._due = None if lifetime is None else self._renewed_at + max(lifetime, _MIN_INTERVAL_SECONDS)
            return True

    def _load(self) -> float | None:
        """Reads or obtains them. Returns their lifetime in seconds; None: until a request gets a 401."""
        raise NotImplementedError


class _ServiceAccount(_RenewedCredentials):
    """The kubelet replaces the token's file well before it expires."""

    def _load(self) -> float | None:
        self.authorization = f"Bearer {(_SERVICE_ACCOUNT / 'token').read_text().strip()}"
        return _REREAD_SECONDS


class _Kubeconfig(_RenewedCredentials):
    def __init__(self, paths: str) -> None:
        """`paths`: one file, or several as in $KUBECONFIG. Raises CredentialsError."""
        from kubernetes.client import Configuration
        from kubernetes.config.config_exception import ConfigException
        from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

        self._configuration, self._paths = Configuration, paths
        self._errors = (ConfigException, OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError)
        try:
            merged: Any = KubeConfigMerger(paths)  # type: ignore[no-untyped-call]
            if merged.config is None:
                raise CredentialsError(f"no cluster: this is not a pod, and there is no kubeconfig {paths}")

            def save() -> None:  # an OIDC provider may take each refresh token once
                with contextlib.suppress(OSError):
                    merged.save_changes()

            self._loader: Any = KubeConfigLoader(  # type: ignore[no-untyped-call]
                merged.config, config_base_path=None, config_persister=save
            )
            context = self._loader.current_context["context"]
            cluster = merged.config["clusters"].get_with_name(context["cluster"])["cluster"]
            name = context.get("user")
            users = [one["user"].value for one in merged.config.value.get("users") or [] if one["name"] == name]
        except self._errors as error:
            raise self._error(error) from None
        self._user: dict[str, Any] = users[0] if users else {}
        verify = not cluster.safe_get("insecure-skip-tls-verify")
        context_of_tls = tls(server_name=cluster.safe_get("tls-server-name"), verify=verify)
        super().__init__("", str(context.get("namespace") or "default"), context_of_tls)
        lifetime = self._load()
        self._due = None if lifetime is None else time.monotonic() + max(lifetime, 1.0)

    def _load(self) -> float | None:
        found = self._configuration()
        for name in ("token", "expiry", "cert_file", "key_file"):  # otherwise it keeps the previous ones
            self._loader.__dict__.pop(name, None)
        try:
            self._loader.load_and_set(found)
            if self.tls.verify_mode is not ssl.CERT_NONE:
                if found.ssl_ca_cert:
                    self.tls.load_verify_locations(found.ssl_ca_cert)
                else:
                    self.tls.load_default_certs()
            if found.cert_file:
                self.tls.load_cert_chain(found.cert_file, found.key_file)
        except self._errors as error:
            raise self._error(error) from None
        header = found.api_key.get("BearerToken")
        if not header and not found.cert_file:
            if program := (self._user.get("exec") or {}).get("command"):
                raise CredentialsError(f"{self._paths}: the exec plugin {program} returned no credentials")
            if provider := (self._user.get("auth-provider") or {}).get("name"):
                raise CredentialsError(
                    f"{self._paths}: auth-provider {provider} returned no credentials; use exec instead"
                )
        self.server, self.proxy = found.host, getattr(self._loader, "proxy", None)
        self.authorization = header.strip() if header else None
        if expiry := getattr(self._loader, "expiry", None):
            left: float = (expiry - datetime.now(UTC)).total_seconds()
            return left - min(_EARLY_SECONDS, left / 5)
        return None if "exec" in self._user else _REREAD_SECONDS

    def _error(self, error: Exception) -> CredentialsError:
        # Some messages hold a whole entry of the file, secrets and all.
        text = re.sub(r"\{.*\}", "{...}", " ".join(str(error).split()))
        return CredentialsError(f"the kubeconfig {self._paths} cannot be used: {text}")


def find() -> Credentials:
    """The service account in a pod, otherwise the kubeconfig. Raises CredentialsError."""
    if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        host = f"[{host}]" if ":" in host else host
        namespace = (_SERVICE_ACCOUNT / "namespace").read_text().strip()
        out = _ServiceAccount(f"https://{host}:{port}", namespace, tls(str(_SERVICE_ACCOUNT / "ca.crt")))
        out.renew()
        return out
    return _Kubeconfig(os.environ.get("KUBECONFIG") or "~/.kube/config")
