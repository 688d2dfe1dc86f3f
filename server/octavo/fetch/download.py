"""HTTP as fetching models needs it: JSON answers, and large files that go on where they stopped.

Standard library only: proxies (HTTPS_PROXY, NO_PROXY) and certificates (SSL_CERT_FILE) are taken from the
environment.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any
from urllib.parse import urlsplit

Headers = dict[str, str] | Callable[[str], dict[str, str]]  # or what makes those of a request to this URL, now
_PIECE = 1 << 20
_ATTEMPTS = 5  # in a row without a single new byte
_BUSY = (408, 429, 500, 502, 503, 504)
_LONGEST_WAIT = 10.0  # seconds
_MAX_JSON = 64 << 20


class ResponseError(Exception):
    """The server answered with an error. ``code`` is the hub's X-Error-Code, if it gave one."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message or f"HTTP {status}")
        self.status, self.code = status, code


class UnreachableError(Exception):
    """There is no server, or it stopped answering."""


@dataclass(frozen=True)
class RemoteFile:
    """Metadata of a file, from its server."""

    size: int | None
    etag: str | None  # that names its bytes exactly
    version: str  # changes with its content, as far as the server tells


class _SameHostAuthorization(urllib.request.HTTPRedirectHandler):
    """Large files are redirected to storage elsewhere; the token is for the hub alone."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        if new is not None and urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            for name in ("Authorization", "X-amz-security-token"):
                new.remove_header(name)
        return new


_opener = urllib.request.build_opener(_SameHostAuthorization)


def get_json(url: str, *, headers: Headers, timeout: float) -> Any:
    """Raises ResponseError, UnreachableError (also for an answer that is not JSON)."""

    def read() -> Any:
        with _open(url, headers, timeout) as answer:
            return json.loads(answer.read(_MAX_JSON))

    try:
        return _retrying(read)
    except ValueError:
        raise UnreachableError("the answer is not JSON; is this the hub's address?") from None


def read_range(url: str, first: int, last: int, *, headers: Headers, timeout: float) -> bytes:
    """The bytes from ``first`` to ``last``, which is one of them, or up to the file's end. Raises ResponseError,
    UnreachableError."""

    def read() -> bytes:
        with _open(url, headers, timeout, {"Range": f"bytes={first}-{last}"}) as answer:
            whole = answer.status == 200  # a server without ranges: no more of it is read than is wanted
            if whole and first:
                answer.read(first)
            return answer.read(last - first + 1)

    found: bytes = _retrying(read)
    return found


def probe(url: str, *, headers: Headers, timeout: float) -> RemoteFile:
    """Ask for the first byte: signed addresses of object stores allow GET alone.

    Raises ResponseError, UnreachableError.
    """

    def read() -> RemoteFile:
        with _open(url, headers, timeout, {"Range": "bytes=0-0"}) as answer:
            partial = re.search(r"/(\d+)$", answer.headers.get("Content-Range", ""))
            whole = answer.headers.get("Content-Length", "") if answer.status == 200 else ""
            size = int(partial[1]) if partial else int(whole) if whole.isdigit() else None
            etag = answer.headers.get("ETag")
            version = etag or f"{answer.headers.get('Last-Modified', '')} {size}"
            return RemoteFile(size, etag if etag and not etag.startswith("W/") else None, version)

    return _retrying(read)  # type: ignore[no-any-return]


def resume(
    url: str,
    into: Path,
    size: int | None,
    *,
    headers: Headers,
    timeout: float,
    advance: Callable[[int], None],
    version: str | None = None,
) -> None:
    """Fetch ``url`` to the end of ``into``, asking only for what it lacks. ``advance`` hears of every new byte;
    ``version``: the ETag of what ``into`` is the beginning of: should the file change, all of it comes.

    Raises ResponseError, UnreachableError, and OSError when the disk does.
    """
    unchanged = {"If-Range": version} if version else {}

    def append(have: int) -> None:
        with _open(url, headers, timeout, unchanged | ({"Range": f"bytes={have}-"} if have else {})) as answer:
            if have and answer.status != 206:  # the server sends all of it again
                os.truncate(into, 0)
                advance(-have)
            _append(answer, into, advance)

    append_to_end(into, size, append, advance)


def append_to_end(into: Path, size: int | None, append: Callable[[int], None], advance: Callable[[int], None]) -> None:
    """Call ``append`` with the length of ``into``, which it lets grow, until that is ``size`` (None: once). A break is
    taken up again while bytes come. Raises what ``append`` raises: ResponseError, UnreachableError, OSError."""
    failures = 0
    while True:
        have = _length(into)
        if size is not None and have > size:
            os.truncate(into, 0)
            have = 0
        if have == size and into.exists():
            return
        try:
            append(have)
            if size is None or _length(into) == size:
                return
            raise UnreachableError(f"the connection ended after {_length(into)} of {size} bytes")
        except ResponseError as error:
            if error.status == 416:  # what is there is not a beginning of that file
                os.truncate(into, 0)
                advance(-have)
            elif error.status not in _BUSY:
                raise
            failures += 1
            if failures >= _ATTEMPTS:
                raise
        except UnreachableError:
            failures = 1 if _length(into) > have else failures + 1
            if failures >= _ATTEMPTS:
                raise
        time.sleep(min(_LONGEST_WAIT, 0.25 * 2**failures))


def _length(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _append(answer: http.client.HTTPResponse, into: Path, advance: Callable[[int], None]) -> None:
    with open(into, "ab", buffering=0) as file:
        while True:
            try:
                piece = answer.read1(_PIECE)
            except (OSError, http.client.HTTPException) as error:
                raise UnreachableError(_why(error)) from None
            if not piece:
                return
            view = memoryview(piece)
            while view:
                view = view[file.write(view) :]
            advance(len(piece))


def _open(
    url: str, headers: Headers, timeout: float, more: Mapping[str, str] = MappingProxyType({})
) -> http.client.HTTPResponse:
    made = headers(url) if callable(headers) else headers
    request = urllib.request.Request(url, headers={"User-Agent": "octavo", **made, **more})
    try:
        answer: http.client.HTTPResponse = _opener.open(request, timeout=timeout)
        return answer
    except urllib.error.HTTPError as error:
        message = error.headers.get("X-Error-Message") or _region_hint(error.headers) or error.reason or ""
        raise ResponseError(error.code, error.headers.get("X-Error-Code") or "", str(message)) from None
    except urllib.error.URLError as error:
        raise UnreachableError(_why(error.reason)) from None
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableError(_why(error)) from None
    except ValueError as error:  # not an address at all
        raise UnreachableError(str(error)) from None


def _region_hint(headers: Message) -> str:
    """S3 names the bucket's own region when it refuses a request to another one."""
    region = headers.get("x-amz-bucket-region")
    return f"the bucket is in region {region}: set AWS_REGION to it" if region else ""


def _retrying(read: Callable[[], Any]) -> Any:
    """A busy server is asked again; one that is not there is not, so that a wrong address shows at once."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return read()
        except ResponseError as error:
            if error.status not in _BUSY or attempt == _ATTEMPTS:
                raise
            time.sleep(min(_LONGEST_WAIT, 0.25 * 2**attempt))
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(_why(error)) from None


def _why(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer (timeout)"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
