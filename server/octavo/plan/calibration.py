"""Measured speeds, kept in a file in Octavo's cache: by device, and by the model that they were measured with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.fetch.cache import cache_dir, disk_error
from octavo.plan.speed import Point, Speed
from octavo.system.file_reading import read_json

NAME = "calibration.json"


def load_speed(device: str, model: str) -> Speed | None:
    """Load the speed of ``device`` as measured with ``model``, else with the model measured last. None: never measured.
    Raises ModelError or ConfigError if the file is damaged."""
    path = cache_dir() / NAME
    if not path.exists():
        return None
    models = read_json(path).get(device)
    if not isinstance(models, dict) or not models:
        return None
    said = models.get(model) or models[list(models)[-1]]
    try:
        return Speed.from_dict(said["speed"], str(path))
    except (TypeError, ValueError, KeyError):
        raise ConfigError(f"{path} is damaged: remove it, and calibrate again") from None


def save_speed(device: str, model: str, speed: Speed, points: list[Point]) -> Path:
    """Keep ``speed`` and what it follows from. Returns the file's path. Raises ModelError."""
    path = cache_dir() / NAME
    said: dict[str, Any] = read_json(path) if path.exists() else {}
    models = said.setdefault(device, {})
    models.pop(model, None)  # the last one is the newest
    models[model] = {"speed": speed.to_dict(), "points": [vars(point) for point in points]}
    whole = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole.write_text(json.dumps(said, indent=1) + "\n")
        whole.replace(path)
    except OSError as error:
        raise disk_error(error, path.parent) from error
    return path
