"""Buckets read by the role of the pod or the machine: IRSA, EKS Pod Identity, instance profiles, Workload Identity.

The library obstore (`octavo[buckets]`) finds such credentials, renews them, and reads by them.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from octavo.errors import ModelError
from octavo.fetch.download import RemoteFile, ResponseError, UnreachableError, append_to_end
from octavo.fetch.object_store import https_address
from octavo.fetch.remote_files import RemoteFiles

_ROLE_VARIABLES = {
    "s3": (
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    ),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY"),
}
_STATUSES = {"NotFoundError": 404, "PermissionDeniedError": 403, "UnauthenticatedError": 401}
_PIECE = 1 << 20
_CONNECT_SECONDS, _READ_SECONDS, _RETRY_SECONDS = 5, 30, 20


def files_of_bucket(address: str, public: RemoteFiles, env: Mapping[str, str] = os.environ) -> RemoteFiles:
    """Return how to read s3://bucket/... or gs://bucket/... without keys: by the role that the environment names, else
    as ``public``, and by the role that the machine may have once that is refused. Raises ModelError where the
    environment names a role and the library that takes it is missing."""
    scheme, _, rest = address.partition("://")
    bucket, has_library = rest.partition("/")[0], importlib.util.find_spec("obstore") is not None
    if named := next((name for name in _ROLE_VARIABLES[scheme] if env.get(name)), None):
        if not has_library:
            raise ModelError(
                f"{named} names a role, which needs the package obstore: install octavo[buckets], or set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        return RoleFiles(scheme, bucket)
    return _PublicOrRoleFiles(public, lambda: RoleFiles(scheme, bucket)) if has_library else public


class _PublicOrRoleFiles:
    """`RemoteFiles` of a bucket that may be public: read unsigned, and by the machine's role once that is refused."""

    def __init__(self, public: RemoteFiles, by_role: Callable[[], RemoteFiles]) -> None:
        self._files, self._by_role = public, by_role
        self._is_public = True

    def probe(self, url: str) -> RemoteFile:
        """See `RemoteFiles`."""
        try:
            return self._files.probe(url)
        except ResponseError as error:
            if not self._is_public or error.status not in (401, 403):
                raise
            role = self._by_role()
            try:
                file = role.probe(url)
            except UnreachableError:  # the machine has no role
                raise error from None
            self._files, self._is_public = role, False
            return file

    def read_range(self, url: str, first: int, last: int) -> bytes:
        """See `RemoteFiles`."""
        if self._is_public:
            self.probe(url)
        return self._files.read_range(url, first, last)

    def resume(self, url: str, into: Path, file: RemoteFile, advance: Callable[[int], None]) -> None:
        """See `RemoteFiles`."""
        self._files.resume(url, into, file, advance)


class RoleFiles:
    """`RemoteFiles` by obstore."""

    def __init__(self, scheme: str, bucket: str) -> None:
        from obstore.store import GCSStore, S3Store

        options: dict[str, Any] = {
            "client_options": {
                "allow_http": True,  # an own store, as AWS_ENDPOINT_URL names it
                "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
                "timeout": timedelta(seconds=_READ_SECONDS),
            },
            "retry_config": {"max_retries": 2, "retry_timeout": timedelta(seconds=_RETRY_SECONDS)},
        }
        self._store: Any = (S3Store if scheme == "s3" else GCSStore)(bucket, **options)
        self._root, _ = https_address(f"{scheme}://{bucket}/key")

    def probe(self, url: str) -> RemoteFile:
        """See `RemoteFiles`."""
        import obstore

        with _translated():
            found = obstore.get(self._store, self._key(url), options={"range": (0, 1)}).meta
        etag = found["e_tag"]
        return RemoteFile(found["size"], etag, etag or f"{found['last_modified']} {found['size']}")

    def read_range(self, url: str, first: int, last: int) -> bytes:
        """See `RemoteFiles`."""
        import obstore

        with _translated():
            return bytes(obstore.get_range(self._store, self._key(url), start=first, end=last + 1))

    def resume(self, url: str, into: Path, file: RemoteFile, advance: Callable[[int], None]) -> None:
        """See `RemoteFiles`."""
        import obstore

        def append(have: int) -> None:
            options: Any = {"if_match": file.etag} | ({"range": {"offset": have}} if have else {})
            with open(into, "ab") as target, _translated():
                for piece in obstore.get(self._store, self._key(url), options=options).stream(min_chunk_size=_PIECE):
                    target.write(piece)
                    advance(len(piece))

        append_to_end(into, file.size, append, advance)

    def _key(self, url: str) -> str:
        return unquote(url.removeprefix(self._root.removesuffix("key")))


@contextmanager
def _translated() -> Iterator[None]:
    """Turn obstore's errors into ResponseError and UnreachableError."""
    from obstore import exceptions

    try:
        yield
    except exceptions.PreconditionError:
        raise ResponseError(412, "", "it has changed while it was read; start again") from None
    except FileNotFoundError:
        raise ResponseError(404, "", "") from None
    except exceptions.BaseError as error:
        message = str(error).partition("\n")[0]
        if status := _STATUSES.get(type(error).__name__):
            raise ResponseError(status, "", message) from None
        raise UnreachableError(message) from None
