"""The file that calibrates decisions: in the model's folder, or where a flag says."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.interface.model_files import ModelFiles

logger = logging.getLogger(__name__)

NAME = "decisions.json"


def read_decisions_file(
    given: str | None, files: ModelFiles, parse: Callable[[Any], dict[str, float]]
) -> dict[str, float]:
    """``parse`` of the contents of the file ``given``, or of the model's own; empty where there is none. Raises
    ConfigError for the former that cannot be used; the latter, which may be something else, is left out with a
    warning."""
    path = Path(given) if given is not None else files.path / NAME
    if given is None and not path.is_file():
        return {}
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        if given is not None:
            raise ConfigError(f"decisions_calibration {given}: {error}") from None
        logger.warning("%s is left out, decisions are not calibrated: %s", path, error)
        return {}
