"""Judges requests as S3 does: the signature over what has really arrived, by AWS's description of it, step by step."""

from __future__ import annotations

import hashlib
import hmac
import re
from datetime import UTC, datetime
from email.message import Message

KEY, SECRET, TOKEN = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "session/token=="
_MAX_SKEW_SECONDS = 900


class S3Judge:
    """``token``: that of a session, which must come, too. ``refused``: why, the last time."""

    def __init__(self, region: str = "us-east-1", token: str | None = None) -> None:
        self.region, self.token, self.refused = region, token, ""

    def __call__(self, path: str, headers: Message) -> int:
        self.refused = self._why_not(path, headers)
        return 403 if self.refused else 0

    def _why_not(self, path: str, headers: Message) -> str:
        said = re.fullmatch(
            r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/s3/aws4_request, ?SignedHeaders=([a-z0-9;-]+), ?"
            r"Signature=([0-9a-f]{64})",
            headers.get("Authorization", ""),
        )
        if not said:
            return "no signature"
        key, day, region, names, signature = said.groups()
        stamp = headers.get("x-amz-date", "")
        age = datetime.now(UTC) - datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        signed = names.split(";")
        sent = {name.lower() for name in headers}
        if not {"host", *(name for name in sent if name.startswith("x-amz-"))} <= set(signed):
            return "host and x-amz-* must be signed"
        if (key, region, day) != (KEY, self.region, stamp[:8]) or abs(age.total_seconds()) > _MAX_SKEW_SECONDS:
            return "another key, region or time"
        if self.token is not None and headers.get("x-amz-security-token") != self.token:
            return "another session"
        where, _, query = path.partition("?")
        request = ["GET", where, "&".join(sorted(query.split("&"))) if query else ""]
        request += [f"{name}:{' '.join((headers.get(name) or '').split())}" for name in signed]
        request += ["", names, headers.get("x-amz-content-sha256", "")]
        digest = hashlib.sha256("\n".join(request).encode()).hexdigest()
        text = "\n".join(["AWS4-HMAC-SHA256", stamp, f"{day}/{region}/s3/aws4_request", digest])
        secret = b"AWS4" + SECRET.encode()
        for part in (day, region, "s3", "aws4_request"):
            secret = hmac.new(secret, part.encode(), hashlib.sha256).digest()
        expected = hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
        return "" if hmac.compare_digest(expected, signature) else "another signature"
