"""A model at an address of the web: one .gguf file, or a folder that holds a safetensors model under its usual names.

A folder cannot be listed over HTTP, so the names that a model's folder may have are asked for one by one. What was
fetched once is used without asking again. OCTAVO_HTTP_TOKEN, if set, is sent as a bearer token to the address's own
host; objects of s3:// and gs:// are asked for with the signatures of object_store.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from octavo.errors import ModelError
from octavo.fetch.bucket_role import files_of_bucket
from octavo.fetch.cache import cache_dir, disk_error, locked, publish, write_json_atomically
from octavo.fetch.download import Headers, RemoteFile, ResponseError, UnreachableError
from octavo.fetch.headers import get_header
from octavo.fetch.model_config import check_before_weights, weight_map_files
from octavo.fetch.object_store import SCHEMES, Signer, https_address
from octavo.fetch.progress import Progress, format_bytes
from octavo.fetch.remote_files import RemoteFiles, WebFiles
from octavo.gguf.file_names import all_parts

_NEEDED = "config.json"
_OPTIONAL = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "decisions.json",
    "processor_config.json",
    "preprocessor_config.json",
)
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_RECORD = "fetched.json"
_MAX_DESCRIPTION = 16 << 20


@dataclass(frozen=True)
class WebAddress:
    """``base`` and ``query`` together are what is asked for; the fragment may pin a file's sha256. ``shown``: as people
    wrote it; ``signer``: of requests to an object store."""

    base: str
    query: str
    sha256: str | None
    shown: str
    signer: Signer | None = None

    @classmethod
    def parse(cls, address: str) -> WebAddress:
        """Raises ModelError."""
        if address.startswith(SCHEMES):
            url, signer = https_address(address)
            return replace(cls.parse(url), shown=address.partition("#")[0].rstrip("/"), signer=signer)
        parts = urlsplit(address)
        pin = re.fullmatch(r"(?:sha256=([0-9a-f]{64}))?", parts.fragment)
        try:
            port_is_fine = parts.port is None or parts.port > 0
        except ValueError:
            port_is_fine = False
        if not parts.hostname or not port_is_fine or not pin or not parts.path.strip("/"):
            raise ModelError(
                f"{hidden(address)!r} is not valid; write https://host/path/file.gguf[#sha256=<64 hex digits>] or "
                "https://host/path/to/a/folder"
            )
        if parts.username is not None:
            raise ModelError(
                f"{hidden(address)}: credentials in an address end up in logs; set "
                "OCTAVO_HTTP_TOKEN to a token of the server"
            )
        path = quote(unquote(parts.path))
        if pin[1] and (not path.endswith(".gguf") or len(all_parts(unquote(path).rpartition("/")[2])) > 1):
            raise ModelError(f"{hidden(address)}: #sha256= pins a single .gguf file, and this is a folder or several")
        base = urlunsplit((parts.scheme, parts.netloc, path.rstrip("/"), "", ""))
        return cls(base, parts.query, pin[1], base)

    @property
    def is_file(self) -> bool:
        """Return whether the address names one .gguf file."""
        return self.base.endswith(".gguf")

    @property
    def name(self) -> str:
        """Name of the file or folder."""
        return unquote(self.base.rpartition("/")[2])

    def of(self, file: str) -> str:
        """The URL of ``file`` in the folder, or of the file itself and its other parts."""
        folder = self.base.rpartition("/")[0] if self.is_file else self.base
        return f"{folder}/{quote(file)}" + (f"?{self.query}" if self.query else "")


def hidden(address: str) -> str:
    """The address as it may be shown: without what could be a secret."""
    if address.startswith(SCHEMES):
        return address.partition("#")[0]
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def fetch_web_model(
    address: str,
    *,
    download_dir: str | None = None,
    progress: bool = True,
    need_weights: bool = True,
    refresh: bool = False,
    check: Callable[[Path], None] = check_before_weights,
    names: Sequence[str] = (),
    version: str = "",
) -> Path:
    """The file or folder on this machine; ``check`` gets the folder before weights are fetched. ``names``: of the
    files of a folder, where they are not a model's; ``version``: what is to be kept apart from other versions of it.
    Raises ModelError with the way out."""
    where = WebAddress.parse(address)
    folder = _folder(where, download_dir, version)
    model = _WebModel(where, folder, progress, names)
    if not refresh and (found := model.recorded(need_weights)):
        return found
    try:
        with locked(folder, wait_for=where.shown):
            if not refresh and (found := model.recorded(need_weights)):
                return found  # another process was faster
            return model.fetch(need_weights, check)
    except UnreachableError as error:
        if found := model.recorded(need_weights):
            return found
        raise _unreachable(where, error) from None
    except ResponseError as error:
        raise _refused(where, error, names) from None
    except OSError as error:
        raise disk_error(error, folder) from None


def cached_web_model(address: str, download_dir: str | None = None) -> Path | None:
    """Return the file or folder of an earlier fetch; None if there is none. Raises ModelError."""
    where = WebAddress.parse(address)
    return _WebModel(where, _folder(where, download_dir), False).recorded(True)


def _folder(where: WebAddress, download_dir: str | None, version: str = "") -> Path:
    key = hashlib.sha256(f"{where.base}?{where.query}#{where.sha256 or version}".encode()).hexdigest()[:16]
    return cache_dir(download_dir) / "web" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', where.name)[:60]}-{key}"


class _WebModel:
    def __init__(self, where: WebAddress, folder: Path, progress: bool, names: Sequence[str] = ()) -> None:
        self.where, self.folder, self.progress, self.names = where, folder, progress, list(names)
        self.remote = _remote(where)

    @property
    def result(self) -> Path:
        return self.folder / all_parts(self.where.name)[0] if self.where.is_file else self.folder

    def recorded(self, need_weights: bool) -> Path | None:
        """Return the result of an earlier fetch if all of it still exists."""
        known = self._versions()
        if known.get("weights", False) < need_weights or not known.get("files"):
            return None
        return self.result if all((self.folder / name).is_file() for name in known["files"]) else None

    def fetch(self, need_weights: bool, check: Callable[[Path], None]) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.where.is_file:
            files = self._get(all_parts(self.where.name))
            need_weights = True
        elif self.names:
            files = self._get(self.names)
        else:
            files = self._get([_NEEDED, *_OPTIONAL])
            if need_weights:
                check(self.folder)
                files |= self._weights()
        write_json_atomically(self.folder / _RECORD, {"weights": need_weights, "files": files})
        return self.result

    def _weights(self) -> dict[str, str]:
        index = self._get([_INDEX], optional=True)
        if not index:
            return self._get([_SINGLE])
        return index | self._get(weight_map_files(self.folder / _INDEX))

    def _get(self, names: list[str], optional: bool = False) -> dict[str, str]:
        """Fetches what is not here in its present version. Returns the files that there are, with their versions."""
        found: dict[str, RemoteFile] = {}
        for name in names:
            try:
                found[name] = self.remote.probe(self.where.of(name))
            except ResponseError as error:
                if not (optional or name in _OPTIONAL) or error.status not in (403, 404, 410):
                    raise  # some stores answer 403 for what is not there
        known = self._versions().get("files", {})
        missing = {
            name: file
            for name, file in found.items()
            if known.get(name) != file.version or not (self.folder / name).is_file()
        }
        total = sum(file.size or 0 for file in missing.values())
        have = sum(part.stat().st_size for part in map(self._part, missing, missing.values()) if part.exists())
        free = shutil.disk_usage(self.folder).free
        if total - have > free:
            raise ModelError(
                f"{self.where.shown} needs {format_bytes(total - have)} more in {self.folder}, which has "
                f"{format_bytes(free)} free; make room, or set OCTAVO_CACHE or --download-dir to a larger disk"
            )
        if missing:
            what = f"fetching {self.where.shown}" + (f" ({len(missing)} files)" if len(missing) > 1 else "")
            with Progress(what, total=total or None, enabled=self.progress) as bar:
                bar.advance(have)
                for name, file in missing.items():
                    self._get_one(name, file, bar)
        return {name: file.version for name, file in found.items()}

    def _get_one(self, name: str, file: RemoteFile, bar: Progress) -> None:
        part = self._part(name, file)
        for old in self.folder.glob(f".{name}.*.part"):
            if old != part:
                old.unlink()  # of a version that is no longer there
        self.remote.resume(self.where.of(name), part, file, bar.advance)
        if (pin := self.where.sha256) and (found := _sha256(part)) != pin:
            part.unlink()
            raise ModelError(
                f"{self.where.shown} has sha256 {found}, expected {pin}: it is damaged or not the file that was "
                "pinned; it was deleted, try again or correct the address"
            )
        if name.endswith((".gguf", ".safetensors")) and _looks_like_a_page(part):
            part.unlink()
            raise ModelError(f"{self.where.of(name).partition('?')[0]} is a web page, not a model; check the address")
        publish(part, self.folder / name)

    def _part(self, name: str, file: RemoteFile) -> Path:
        """Return the path of the growing download. Its name contains the version, so that two versions are never
        mixed."""
        return self.folder / f".{name}.{hashlib.sha256(file.version.encode()).hexdigest()[:12]}.part"

    def _versions(self) -> dict[str, Any]:
        try:
            known = json.loads((self.folder / _RECORD).read_text(encoding="utf-8"))
            return known if isinstance(known, dict) and isinstance(known.get("files"), dict) else {}
        except (OSError, ValueError):
            return {}


def _looks_like_a_page(path: Path) -> bool:
    with open(path, "rb") as file:
        return bool(re.match(rb"\s*<(!doctype|html)", file.read(64), re.IGNORECASE))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _headers(where: WebAddress) -> Headers:
    if where.signer and where.signer.credentials:
        return where.signer
    token = os.environ.get("OCTAVO_HTTP_TOKEN", "").strip()
    return {"Authorization": f"Bearer {token}"} if token and not where.shown.startswith("s3://") else {}


def _remote(where: WebAddress) -> RemoteFiles:
    headers = _headers(where)
    files = WebFiles(headers)
    return files if headers or where.signer is None else files_of_bucket(where.shown, files)


def fetch_web_headers(address: str, into: Path) -> Path:
    """The description of a model at an address and its files of weights, with their headers and nothing behind them:
    of the right size, they take no room. Raises ModelError."""
    where = WebAddress.parse(address)
    remote = _remote(where)

    def read(name: str) -> Callable[[int, int], bytes]:
        return lambda first, last: remote.read_range(where.of(name), first, last)

    def weights(names: list[str]) -> None:
        for name in names:
            size = remote.probe(where.of(name)).size
            get_header(read(name), size, into / name)

    try:
        if where.is_file:
            weights(all_parts(where.name))
            return into / all_parts(where.name)[0]
        for name in (_NEEDED, *(one for one in _OPTIONAL if "config" in one), _INDEX):
            try:
                (into / name).write_bytes(read(name)(0, _MAX_DESCRIPTION - 1))
            except ResponseError as error:
                if name == _NEEDED or error.status not in (403, 404, 410):
                    raise
        weights(weight_map_files(into / _INDEX) if (into / _INDEX).exists() else [_SINGLE])
        return into
    except UnreachableError as error:
        raise _unreachable(where, error) from None
    except ResponseError as error:
        raise _refused(where, error) from None


def _unreachable(where: WebAddress, error: UnreachableError) -> ModelError:
    return ModelError(
        f"cannot fetch {where.shown}: {error}; check the address, the network and HTTPS_PROXY, or name a model that is "
        "on this machine"
    )


def _refused(where: WebAddress, error: ResponseError, names: Sequence[str] = ()) -> ModelError:
    variables = "OCTAVO_HTTP_TOKEN" if where.signer is None else "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if error.status in (401, 403):
        hint = f"{variables} may lack access" if _headers(where) else f"set {variables}"
        return ModelError(f"{where.shown} cannot be read (HTTP {error.status}): {hint}, or use a public address")
    if error.status in (404, 410):
        files = " and ".join(names) or f"{_NEEDED} and {_SINGLE} or {_INDEX}"
        needed, what = "" if where.is_file else f" (a folder needs {files})", "adapter" if names else "model"
        return ModelError(f"there is no {what} at {where.shown} (HTTP {error.status}){needed}: check the address")
    hint = "check the address" if error.status < 500 else "try again later"
    return ModelError(f"{where.shown} was answered with HTTP {error.status} ({error}); {hint}")
