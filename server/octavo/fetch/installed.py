"""The models that were fetched to this machine: Octavo's own cache, and the one that all Hugging Face tools share."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ModelError
from octavo.fetch.cache import cache_dir, disk_error, hub_cache, serving_process
from octavo.fetch.model_names import ALIASES, hub_address, near_models
from octavo.fetch.pypi import PackageFile
from octavo.gguf.file_names import models_of, quantised_as

_QUANT = re.compile(
    r"[.\-_]((?:UD-)?(?:I?Q\d\w*|T?Q\d_0|BF16|F16|F32|MXFP4\w*|NVFP4))(?:-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE
)


@dataclass(frozen=True)
class Installed:
    """``path``: the .gguf file or folder that is served. ``places``: what removing it deletes, whole."""

    name: str
    path: Path
    places: tuple[Path, ...]

    @property
    def weights(self) -> list[Path]:
        """The files of its weights, as far as they are here."""
        return [self.path] if self.path.is_file() else sorted(self.path.glob("*.safetensors"))

    @property
    def modified(self) -> int:
        """When the newest file of its weights was written here, in seconds since 1970; 0 if it has none."""
        return max((int(file.stat().st_mtime) for file in self.weights if file.exists()), default=0)

    @property
    def num_bytes(self) -> int:
        """Sum the sizes of the files that removing it deletes, each counted once."""
        return bytes_of(self.places)


def installed(download_dir: str | None = None) -> list[Installed]:
    """All of them, by name."""
    found = [*_in_octavo_cache(cache_dir(download_dir)), *_in_hub_cache(hub_cache(download_dir))]
    return sorted(found, key=lambda model: model.name.lower())


def find_installed(name: str, download_dir: str | None = None) -> Installed:
    """The model of that name. Raises ModelError, with the name that may have been meant."""
    models = {model.name: model for model in installed(download_dir)}
    wanted = hub_address(name)[0].removeprefix("hf://")
    for form in (wanted, wanted.removesuffix(":latest")):
        if form in models:
            return models[form]
        of_repository = [model for other, model in models.items() if re.match(rf"{re.escape(form)}[:/]", other)]
        if len(of_repository) == 1:
            return of_repository[0]
        if of_repository:
            names = ", ".join(model.name for model in of_repository)
            raise ModelError(f"{name} has several files on this machine: {names}; name one")
    near = near_models(name, download_dir) or (
        "; `octavo list` names those that are" if models else "; no model is: `octavo pull` fetches one"
    )
    raise ModelError(f"{name} is not on this machine{near}")


def remove(model: Installed, download_dir: str | None = None) -> None:
    """Delete the model's files. Raises ModelError while it is served, or where it cannot be written."""
    check_not_served(model, download_dir)
    for place in model.places:
        try:
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)
        except OSError as error:
            raise disk_error(error, place) from None


def check_not_served(model: Installed, download_dir: str | None = None) -> None:
    """Raises ModelError while a server of this machine serves the model."""
    for file in model.weights:
        if (process := serving_process(file, download_dir)) is not None:
            who = f" by process {process}" if process else ""
            raise ModelError(f"{model.name} is being served{who}; stop that server first")


def _in_octavo_cache(root: Path) -> Iterator[Installed]:
    aliases = {PackageFile.parse(address).path(root): alias for alias, address in ALIASES.items()}
    for folder in _folders(root / "pypi"):
        folders = [file.parent for file in folder.rglob("config.json") if any(file.parent.glob("*.safetensors"))]
        for member in [*folder.rglob("*.gguf"), *folders]:
            package, version = _package_and_version(folder.name)
            name = aliases.get(member) or f"pypi://{package}=={version}/{member.relative_to(folder)}"
            yield Installed(name, member, (folder,))
    for folder in _folders(root / "web"):
        ggufs = sorted(folder.glob("*.gguf"))
        # An adapter is no model: neither listed, nor evicted while it is served.
        if (folder / "fetched.json").exists() and not (folder / "adapter_config.json").exists():
            name = folder.name.rpartition("-")[0] or folder.name
            yield Installed(name, ggufs[0] if ggufs else folder, (folder,))


def _package_and_version(folder: str) -> tuple[str, str]:
    match = re.fullmatch(r"(?P<name>.+?)-(?P<version>\d[^-]*)(?:-[0-9a-f]{16})?", folder)
    return (match["name"], match["version"]) if match else (folder, "")


def _in_hub_cache(cache: Path) -> Iterator[Installed]:
    for folder in _folders(cache):
        snapshot = _snapshot(folder) if folder.name.startswith("models--") else None
        if snapshot is None:
            continue
        repository = folder.name.removeprefix("models--").replace("--", "/")
        found = {file.relative_to(snapshot).as_posix(): file for file in snapshot.rglob("*.gguf") if file.exists()}
        models = models_of(found)
        whole = (snapshot / "config.json").exists() and any(snapshot.glob("*.safetensors"))
        everything = (folder, cache / ".locks" / folder.name)
        if whole:
            yield Installed(repository, snapshot, everything)
        for model, parts in models.items():
            alone = len(models) == 1 and not whole
            places = tuple(place for part in parts for place in _file_and_blob(found[part]))
            name = _gguf_name(repository, model, [*models])
            yield Installed(name, found[parts[0]], everything if alone else places)


def _gguf_name(repository: str, file: str, others: list[str]) -> str:
    """Return ``org/name:QUANT`` if it is unambiguous, else ``org/name/file.gguf``."""
    quant = _QUANT.search(file)
    alone = quant is not None and quantised_as(others, quant[1]) == [file]
    return f"{repository}:{quant[1]}" if quant and alone else f"{repository}/{file}"


def _file_and_blob(file: Path) -> tuple[Path, ...]:
    target = file.resolve()
    return (file,) if target == file else (file, target)


def _snapshot(folder: Path) -> Path | None:
    """The snapshot of the branch main, else the newest."""
    try:
        commit = (folder / "refs" / "main").read_text().strip()
        if (folder / "snapshots" / commit).is_dir():
            return folder / "snapshots" / commit
    except OSError:
        pass
    snapshots = sorted(_folders(folder / "snapshots"), key=lambda path: path.stat().st_mtime)
    return snapshots[-1] if snapshots else None


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir())
    except OSError:
        return []


def bytes_of(places: Iterable[Path]) -> int:
    """Sum the sizes of all files below these paths, each counted once."""
    return sum(_sizes(places))


def _sizes(places: Iterable[Path]) -> Iterator[int]:
    seen: set[tuple[int, int]] = set()
    for place in places:
        for file in place.rglob("*") if place.is_dir() else [place]:
            try:
                stat = os.stat(file)
            except OSError:
                continue
            if file.is_file() and (stat.st_dev, stat.st_ino) not in seen:
                seen.add((stat.st_dev, stat.st_ino))
                yield stat.st_size
