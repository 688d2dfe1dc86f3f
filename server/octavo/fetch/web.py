"""A model at an address of the web: one .gguf file, or a folder that holds a safetensors model under its usual names.

A folder cannot be listed over HTTP, so the names that a model's folder may have are asked for one by one. What was
fetched once is used without asking again. OCTAVO_HTTP_TOKEN, if set, is sent as a bearer token to the address's own
host.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from octavo.errors import ModelError
from octavo.fetch.cache import cache_dir, disk_error, locked, publish, write_json_atomically
from octavo.fetch.download import RemoteFile, ResponseError, UnreachableError, probe, resume
from octavo.fetch.model_config import weight_map_files
from octavo.fetch.progress import Progress, format_bytes

_NEEDED = "config.json"
_OPTIONAL = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json", "processor_config.json",
)  # fmt: skip
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_TIMEOUT = 30.0
_RECORD = "fetched.json"


@dataclass(frozen=True)
class WebAddress:
    """``base`` and ``query`` together are what is asked for; the fragment may pin a file's sha256."""

    base: str
    query: str
    sha256: str | None

    @classmethod
    def parse(cls, address: str) -> WebAddress:
        """Raises ModelError."""
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
        if pin[1] and not path.endswith(".gguf"):
            raise ModelError(f"{hidden(address)}: #sha256= pins a single .gguf file, and this is a folder")
        return cls(urlunsplit((parts.scheme, parts.netloc, path.rstrip("/"), "", "")), parts.query, pin[1])

    @property
    def is_file(self) -> bool:
        """Whether the address is that of one .gguf file."""
        return self.base.endswith(".gguf")

    @property
    def name(self) -> str:
        """Name of the file or folder."""
        return unquote(self.base.rpartition("/")[2])

    def of(self, file: str) -> str:
        """The URL of ``file`` in the folder, or of the file itself."""
        return (self.base if self.is_file else f"{self.base}/{quote(file)}") + (f"?{self.query}" if self.query else "")


def hidden(address: str) -> str:
    """The address as it may be shown: without what could be a secret."""
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def fetch_web_model(
    address: str, *, download_dir: str | None = None, progress: bool = True, need_weights: bool = True,
    refresh: bool = False,
) -> Path:  # fmt: skip
    """The file or folder on this machine. Raises ModelError with the way out."""
    where = WebAddress.parse(address)
    key = hashlib.sha256(f"{where.base}?{where.query}#{where.sha256 or ''}".encode()).hexdigest()[:16]
    folder = cache_dir(download_dir) / "web" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', where.name)[:60]}-{key}"
    model = _WebModel(where, folder, progress)
    if not refresh and (found := model.recorded(need_weights)):
        return found
    try:
        with locked(folder, wait_for=where.base):
            if not refresh and (found := model.recorded(need_weights)):
                return found  # another process was faster
            return model.fetch(need_weights)
    except UnreachableError as error:
        if found := model.recorded(need_weights):
            return found
        raise ModelError(
            f"cannot fetch {where.base}: {error}; check the address, the network and HTTPS_PROXY, or name a model that "
            "is on this machine"
        ) from None
    except ResponseError as error:
        raise _refused(where, error) from None
    except OSError as error:
        raise disk_error(error, folder) from None


class _WebModel:
    def __init__(self, where: WebAddress, folder: Path, progress: bool) -> None:
        self.where, self.folder, self.progress = where, folder, progress
        token = os.environ.get("OCTAVO_HTTP_TOKEN", "").strip()
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}

    @property
    def result(self) -> Path:
        return self.folder / self.where.name if self.where.is_file else self.folder

    def recorded(self, need_weights: bool) -> Path | None:
        """What an earlier fetch brought, when all of it is still there."""
        known = self._versions()
        if known.get("weights", False) < need_weights or not known.get("files"):
            return None
        return self.result if all((self.folder / name).is_file() for name in known["files"]) else None

    def fetch(self, need_weights: bool) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.where.is_file:
            files = self._get([self.where.name])
            need_weights = True
        else:
            files = self._get([_NEEDED, *_OPTIONAL])
            if need_weights:
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
                found[name] = probe(self.where.of(name), headers=self.headers, timeout=_TIMEOUT)
            except ResponseError as error:
                if not (optional or name in _OPTIONAL) or error.status not in (403, 404, 410):
                    raise  # some stores answer 403 for what is not there
        known = self._versions().get("files", {})
        missing = {
            name: file for name, file in found.items()
            if known.get(name) != file.version or not (self.folder / name).is_file()
        }  # fmt: skip
        total = sum(file.size or 0 for file in missing.values())
        have = sum(part.stat().st_size for part in map(self._part, missing, missing.values()) if part.exists())
        free = shutil.disk_usage(self.folder).free
        if total - have > free:
            raise ModelError(
                f"{self.where.base} needs {format_bytes(total - have)} more in {self.folder}, which has "
                f"{format_bytes(free)} free; make room, or set OCTAVO_CACHE or --download-dir to a larger disk"
            )
        if missing:
            what = f"fetching {self.where.base}" + (f" ({len(missing)} files)" if len(missing) > 1 else "")
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
        # If-Range: should the file change now, all of it comes, never the end of another version.
        headers = self.headers | ({"If-Range": file.etag} if file.etag else {})
        resume(self.where.of(name), part, file.size, headers=headers, timeout=_TIMEOUT, advance=bar.advance)
        if (pin := self.where.sha256) and (found := _sha256(part)) != pin:
            part.unlink()
            raise ModelError(
                f"{self.where.base} has sha256 {found}, expected {pin}: it is damaged or not the file that was "
                "pinned; it was deleted, try again or correct the address"
            )
        if name.endswith((".gguf", ".safetensors")) and _looks_like_a_page(part):
            part.unlink()
            raise ModelError(f"{self.where.of(name).partition('?')[0]} is a web page, not a model; check the address")
        publish(part, self.folder / name)

    def _part(self, name: str, file: RemoteFile) -> Path:
        """Where it grows. Named by its version, so that two are never put together."""
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


def _refused(where: WebAddress, error: ResponseError) -> ModelError:
    if error.status in (401, 403):
        hint = "OCTAVO_HTTP_TOKEN may lack access" if os.environ.get("OCTAVO_HTTP_TOKEN") else "set OCTAVO_HTTP_TOKEN"
        return ModelError(f"{where.base} cannot be read (HTTP {error.status}): {hint}, or use a public address")
    if error.status in (404, 410):
        needed = "" if where.is_file else f" (a folder needs {_NEEDED} and {_SINGLE} or {_INDEX})"
        return ModelError(f"there is no model at {where.base} (HTTP {error.status}){needed}: check the address")
    return ModelError(f"{where.base} was answered with HTTP {error.status} ({error}); try again later")
