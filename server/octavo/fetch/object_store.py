"""Buckets: s3:// (and other stores with its protocol) and gs://, read over HTTPS like any other web server.

Requests are signed with AWS's Signature Version 4, which Google Cloud Storage takes for HMAC keys, too. The variables
are those of AWS's own tools: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION (or
AWS_DEFAULT_REGION), AWS_ENDPOINT_URL_S3 (or AWS_ENDPOINT_URL). Without keys requests are not signed: public buckets.

https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from octavo.errors import ModelError

SCHEMES = ("s3://", "gs://")
_FORM = re.compile(
    r"(?P<scheme>s3|gs)://(?P<bucket>[a-z0-9][a-z0-9._-]{1,254})/(?P<key>[^#]+?)(?P<pin>#sha256=[0-9a-f]{64})?"
)
_GOOGLE = "https://storage.googleapis.com"
_EMPTY = hashlib.sha256(b"").hexdigest()
_NEVER_ESCAPED = "-_.~"


@dataclass(frozen=True)
class Credentials:
    """Keys of a store, and the token of keys that expire."""

    key: str
    secret: str
    token: str = ""


@dataclass(frozen=True)
class Signer:
    """Makes the headers of requests. Without ``credentials`` there are none."""

    region: str
    credentials: Credentials | None

    def __call__(self, url: str) -> dict[str, str]:
        """The headers of a GET of ``url`` that is sent now."""
        if self.credentials is None:
            return {}
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        return sign(url, self.credentials, self.region, stamp)


def https_address(address: str, env: Mapping[str, str] = os.environ) -> tuple[str, Signer]:
    """Return the https URL of s3://bucket/key or gs://bucket/key, and the signer of its requests. Raises ModelError."""
    match = _FORM.fullmatch(address)
    if not match or not match["key"].strip("/"):
        scheme = address.partition("://")[0]
        raise ModelError(
            f"{address!r} is not valid; write {scheme}://bucket/path/file.gguf[#sha256=<64 hex digits>] or "
            f"{scheme}://bucket/path/to/a/folder"
        )
    bucket, path = match["bucket"], quote(unquote(match["key"]), safe=f"/{_NEVER_ESCAPED}") + (match["pin"] or "")
    credentials = _credentials(env)
    if match["scheme"] == "gs":
        return f"{_GOOGLE}/{bucket}/{path}", Signer("auto", credentials)
    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or "us-east-1"
    endpoint = (env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or "").rstrip("/")
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise ModelError(f"AWS_ENDPOINT_URL must begin with http:// or https://, got {endpoint!r}")
    if endpoint:
        return f"{endpoint}/{bucket}/{path}", Signer(region, credentials)
    domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    if "." in bucket:  # no certificate covers it as a host
        return f"https://s3.{region}.{domain}/{bucket}/{path}", Signer(region, credentials)
    return f"https://{bucket}.s3.{region}.{domain}/{path}", Signer(region, credentials)


def _credentials(env: Mapping[str, str]) -> Credentials | None:
    key, secret = env.get("AWS_ACCESS_KEY_ID", "").strip(), env.get("AWS_SECRET_ACCESS_KEY", "").strip()
    if bool(key) != bool(secret):
        missing = "AWS_SECRET_ACCESS_KEY" if key else "AWS_ACCESS_KEY_ID"
        raise ModelError(f"{missing} is not set, and the other half of the key is: set both, or neither")
    return Credentials(key, secret, env.get("AWS_SESSION_TOKEN", "").strip()) if key else None


def sign(
    url: str, credentials: Credentials, region: str, stamp: str, more: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The headers that authenticate a GET of ``url`` at ``stamp`` (20130524T000000Z), and the ones in ``more`` (names
    in lower case) with it. Signature Version 4."""
    parts = urlsplit(url)
    headers = {"host": parts.netloc, "x-amz-content-sha256": _EMPTY, "x-amz-date": stamp, **(more or {})}
    if credentials.token:
        headers["x-amz-security-token"] = credentials.token
    names = ";".join(sorted(headers))
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    query = sorted((quote(key, safe=_NEVER_ESCAPED), quote(value, safe=_NEVER_ESCAPED)) for key, value in pairs)
    canonical = "\n".join(
        (
            "GET",
            parts.path or "/",
            "&".join(f"{k}={v}" for k, v in query),
            *(f"{name}:{headers[name].strip()}" for name in sorted(headers)),
            "",
            names,
            _EMPTY,
        )
    )
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{credentials.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    del headers["host"]  # the client sends it itself
    headers["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.key}/{scope},SignedHeaders={names},Signature={signature}"
    )
    return headers
