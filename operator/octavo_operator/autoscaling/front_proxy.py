"""Authentication and authorization of requests to the metrics API.

The API server authenticates the user and names it in headers, which are trusted only over a connection with the front
proxy's client certificate. Authorization is asked of the API server (SubjectAccessReview).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo_operator.kube.client import KubeClient

Json = dict[str, Any]

REVIEW_CACHE_SECONDS = 10.0
_MAX_REVIEWS = 1000


class FrontProxyConfigError(ValueError):
    """The cluster has no valid configuration of its front proxy; the message says what is missing."""


@dataclass(frozen=True)
class FrontProxy:
    """Certificates and names by which the cluster's front proxy is recognised."""

    authority: str  # PEM
    allowed_names: tuple[str, ...]  # common names; empty: any that the authority has signed
    user_headers: tuple[str, ...]
    group_headers: tuple[str, ...]
    extra_prefixes: tuple[str, ...]

    @classmethod
    def of(cls, config_map: Json | None) -> FrontProxy:
        """Read the ConfigMap kube-system/extension-apiserver-authentication. Raises FrontProxyConfigError."""
        data = (config_map or {}).get("data") or {}
        authority = data.get("requestheader-client-ca-file") or ""
        if "BEGIN CERTIFICATE" not in authority:
            raise FrontProxyConfigError(
                "the ConfigMap kube-system/extension-apiserver-authentication has no requestheader-client-ca-file: the "
                "API server was started without an aggregation layer (--requestheader-client-ca-file)"
            )

        def words(name: str) -> tuple[str, ...]:
            try:
                value = json.loads(data.get(f"requestheader-{name}") or "[]")
            except ValueError:
                raise FrontProxyConfigError(
                    f"requestheader-{name} is not a list: {data[f'requestheader-{name}']!r}"
                ) from None
            return tuple(str(one) for one in value)

        return cls(
            authority,
            words("allowed-names"),
            words("username-headers"),
            words("group-headers"),
            words("extra-headers-prefix"),
        )

    def is_trusted(self, certificate: Mapping[str, Any] | None) -> bool:
        """True if a peer with this certificate, verified by TLS, is the front proxy. As ssl.getpeercert returns it."""
        if not certificate:
            return False
        found = {value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"}
        return not self.allowed_names or bool(found & set(self.allowed_names))

    def user(self, headers: Any) -> Json | None:
        """The user that the headers (a multidict) name, in the form of a SubjectAccessReview."""
        name = next((value for header in self.user_headers if (value := headers.get(header))), None)
        if not name:
            return None
        groups = [group for header in self.group_headers for group in headers.getall(header, [])]
        extra: dict[str, list[str]] = {}
        for header in headers:
            for prefix in self.extra_prefixes:
                if header.lower().startswith(prefix.lower()):
                    extra[header[len(prefix) :].lower()] = headers.getall(header)
        return {"user": name, "groups": groups, **({"extra": extra} if extra else {})}


class Reviews:
    """SubjectAccessReviews, cached for a few seconds."""

    def __init__(self, client: KubeClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._clock = client, clock
        self._known: dict[str, tuple[float, bool]] = {}

    async def allows(self, user: Json, group: str, version: str, namespace: str, resource: str) -> bool:
        """True if `user` may list the resource. Raises ApiError and TRANSPORT_ERRORS."""
        attributes = {"namespace": namespace, "verb": "list", "group": group, "version": version, "resource": resource}
        spec = {**user, "resourceAttributes": attributes}
        key = json.dumps(spec, sort_keys=True)
        now = self._clock()
        if (known := self._known.get(key)) and now - known[0] < REVIEW_CACHE_SECONDS:
            return known[1]
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        answer = await self._client.call("POST", path, body, timeout=5)
        allowed = bool((answer.get("status") or {}).get("allowed"))
        if len(self._known) >= _MAX_REVIEWS:
            self._known = {k: v for k, v in self._known.items() if now - v[0] < REVIEW_CACHE_SECONDS}
        if len(self._known) < _MAX_REVIEWS:
            self._known[key] = (now, allowed)
        return allowed
