"""A cache of bounded size: the models that nobody has used for the longest time go first.

Who fetches a model, or serves it, uses it. A cache that several pods of a node share is safe: marks and locks are the
kernel's, and one process at a time decides what goes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from octavo.errors import ModelError
from octavo.fetch.cache import cache_dir, hub_cache, locked, serving_process, use_mark
from octavo.fetch.installed import Installed, bytes_of, installed, remove
from octavo.fetch.progress import format_bytes
from octavo.interface.model_files import ModelFiles

# A model that was just fetched is about to be served, by a process that has yet to start.
_GRACE_SECONDS = 900.0
_ABANDONED_SECONDS = 86400.0  # of a part of a file that nobody has gone on with
_PARTS = ("web/*/.*.part", "*/blobs/*.incomplete")


def keep_and_evict(files: ModelFiles, max_bytes: int, download_dir: str | None = None) -> bool:
    """Note that the model of ``files`` is used, then remove others until all take no more than ``max_bytes``. False:
    its files have been removed meanwhile, and it is to be fetched again. Raises ModelError."""
    with locked(cache_dir(download_dir) / "eviction"):
        if not all(os.path.exists(path) for path in files.weights):
            return False
        for path in files.weights[:1]:
            mark = use_mark(path, download_dir)
            with contextlib.suppress(OSError):  # a cache that cannot be written, from which nothing is removed
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()
        _evict(max_bytes, download_dir)
    return True


def _evict(max_bytes: int, download_dir: str | None) -> None:
    now = time.time()
    _remove_abandoned_parts(now, download_dir)
    models = [model for model in installed(download_dir) if _is_removable(model, download_dir)]
    used = {model.name: _last_used(model, download_dir) for model in models}
    kept = {
        os.path.realpath(path)
        for model in models
        if _is_in_use(model, used, now, download_dir)
        for path in model.weights
    }
    total = bytes_of(place for model in models for place in model.places)
    for model in sorted(models, key=lambda model: used[model.name]):
        if total <= max_bytes:
            return
        if _holds(model, kept):
            continue
        try:
            remove(model, download_dir)
        except ModelError as error:
            print(f"octavo: warning: {error}", file=sys.stderr)
            continue
        print(f"removed {model.name} from the cache, last used {_ago(now - used[model.name])} ago", file=sys.stderr)
        total = bytes_of(place for one in models for place in one.places)
    if total > max_bytes:
        print(
            f"octavo: warning: the cache has {format_bytes(total)}, more than {format_bytes(max_bytes)}, and all of it "
            "is in use",
            file=sys.stderr,
        )


def _is_removable(model: Installed, download_dir: str | None) -> bool:
    """Return whether the model lies in a cache, and not in a container image."""
    roots = [os.path.realpath(root) for root in (cache_dir(download_dir), hub_cache(download_dir))]
    return all(any(os.path.realpath(place).startswith(root + os.sep) for root in roots) for place in model.places)


def _last_used(model: Installed, download_dir: str | None) -> float:
    times = [0.0]
    for file in model.weights:
        for path in (use_mark(file, download_dir), file):
            with contextlib.suppress(OSError):
                times.append(path.stat().st_mtime)
    return max(times)


def _is_in_use(model: Installed, used: dict[str, float], now: float, download_dir: str | None) -> bool:
    if now - used[model.name] < _GRACE_SECONDS:
        return True
    return any(serving_process(file, download_dir) is not None for file in model.weights)


def _holds(model: Installed, kept: set[str]) -> bool:
    """Return whether removing it would remove weights in use, also of another model in its repository."""
    places = [os.path.realpath(place) for place in model.places]
    return any(path == place or path.startswith(place + os.sep) for path in kept for place in places)


def _remove_abandoned_parts(now: float, download_dir: str | None) -> None:
    for root in (cache_dir(download_dir), hub_cache(download_dir)):
        for part in (path for pattern in _PARTS for path in Path(root).glob(pattern)):
            with contextlib.suppress(OSError):
                if now - part.stat().st_mtime > _ABANDONED_SECONDS:
                    part.unlink()


def _ago(seconds: float) -> str:
    return f"{seconds / 86400:.1f} days" if seconds >= 86400 else f"{seconds / 3600:.1f} hours"
