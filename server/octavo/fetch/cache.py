"""Octavo's cache folder, safe against crashes and other processes.

Every file appears by an atomic rename, so it is never partial. Its writer holds a lock, which the kernel releases when
the process dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.errors import ModelError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cache_dir(download_dir: str | None = None) -> Path:
    """``download_dir``, else OCTAVO_CACHE, else XDG_CACHE_HOME/octavo, else ~/.cache/octavo."""
    if download_dir or os.environ.get("OCTAVO_CACHE"):
        return Path(download_dir or os.environ["OCTAVO_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "octavo"


def hub_cache(download_dir: str | None = None) -> Path:
    """Return the folder of models from a hub: the one that every Hugging Face tool shares, or ``download_dir``."""
    if download_dir:
        return Path(download_dir).expanduser()
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    return hf_home() / "hub"


def hf_home() -> Path:
    """Hugging Face's own folder."""
    if os.environ.get("HF_HOME"):
        return Path(os.environ["HF_HOME"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"


def find_seeded(place: str) -> Path | None:
    """A file or folder of the read-only cache at OCTAVO_CACHE_SEED (part of a container image), None if not there."""
    seed = os.environ.get("OCTAVO_CACHE_SEED")
    path = Path(seed, place) if seed else None
    return path if path and path.exists() else None


def disk_error(error: OSError, where: Path) -> ModelError:
    """Describe an error while writing to ``where``, with the way out."""
    if error.errno in _FULL:
        return ModelError(
            f"no space left while writing to {where}; free some, or set OCTAVO_CACHE (models from a hub: HF_HOME) "
            "or --download-dir to a larger disk"
        )
    return ModelError(
        f"cannot write to {where}: {error.strerror or error}; set OCTAVO_CACHE (models from a hub: HF_HOME) "
        "or --download-dir to a folder that can be written"
    )


@contextlib.contextmanager
def locked(path: Path, *, wait_for: str | None = None) -> Iterator[None]:
    """Hold ``path``.lock; other processes wait, and say what for when it has a name."""
    lock = path.with_name(path.name + ".lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise disk_error(error, lock.parent) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait_for:
                print(f"waiting for another process that is fetching {wait_for}", file=sys.stderr, flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def mark_as_served(weights: tuple[str, ...], download_dir: str | None = None) -> None:
    """Note that this process serves a model of these files, as long as it lives: `octavo rm` leaves them alone."""
    for path in weights[:1]:
        mark = use_mark(path, download_dir)
        try:
            mark.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(handle, fcntl.LOCK_SH)
            os.ftruncate(handle, 0)
            os.write(handle, str(os.getpid()).encode())
        except OSError:
            return  # a cache that cannot be written, from which nothing is removed either
        _marks.append(handle)


def serving_process(path: str | Path, download_dir: str | None = None) -> int | None:
    """The id of a process that serves a model whose weights begin with this file; None if there is none."""
    try:
        handle = os.open(use_mark(path, download_dir), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        said = os.read(handle, 20)
        return int(said) if said.isdigit() else 0
    finally:
        os.close(handle)


_marks: list[int] = []  # open as long as this process lives


def use_mark(path: str | Path, download_dir: str | None = None) -> Path:
    """The file that is locked while weights are served, and whose time says when they were used."""
    return cache_dir(download_dir) / "served" / hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:32]


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A temporary folder beside what is to be made (same file system, so that a rename is atomic).

    Call it under the lock of what is made: left-overs of killed processes go first.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for old in parent.glob(".making-*"):
            shutil.rmtree(old, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=".making-", dir=parent))
    except OSError as error:
        raise disk_error(error, parent) from None
    try:
        yield folder
    except OSError as error:
        if error.errno in (*_FULL, errno.EACCES, errno.EROFS):
            raise disk_error(error, parent) from None
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(made: Path, final: Path) -> None:
    """Move a finished file or folder to its place, contents first on the disk."""
    for path in [made] if made.is_file() else [p for p in made.rglob("*") if p.is_file()]:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    os.rename(made, final)


def write_json_atomically(path: Path, value: Any) -> None:
    """Write a small record; call it under a lock of ``path``."""
    made = path.with_name(path.name + ".new")
    write_json(made, value)
    publish(made, path)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as UTF-8 JSON."""
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
