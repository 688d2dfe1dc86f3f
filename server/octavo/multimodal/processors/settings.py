"""What a checkpoint's files say about its image processor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, ModelError
from octavo.system.file_reading import read_json


@dataclass(frozen=True)
class Settings:
    """``image``: of the image processor (preprocessor_config.json), ``processor``: of what joins text and images
    (processor_config.json), ``model``: config.json."""

    image: dict[str, Any]
    processor: dict[str, Any]
    model: Mapping[str, Any]

    @property
    def vision(self) -> Mapping[str, Any]:
        """config.json's part about the encoder of images."""
        vision = self.model.get("vision_config")
        return vision if isinstance(vision, Mapping) else {}

    def size(self, name: str = "size", square: bool = False) -> dict[str, int]:
        """A size as a dict of named edges; a bare number is the shorter edge, or with ``square`` both."""
        value = self.image[name]
        if isinstance(value, int):
            value = {"height": value, "width": value} if square or name != "size" else {"shortest_edge": value}
        if isinstance(value, (list, tuple)) and len(value) == 2:
            value = {"height": value[0], "width": value[1]}
        found = {key: edge for key, edge in value.items() if edge is not None} if isinstance(value, dict) else {}
        if not found or not all(isinstance(edge, int) and edge > 0 for edge in found.values()):
            raise ModelError(f"the image processor's {name} must name edges in pixels, got {value!r}")
        return found


def read_settings(
    folder: str | Path,
    hf_config: Mapping[str, Any],
    defaults: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """The checkpoint's files over ``defaults``, ``overrides`` (mm_processor_kwargs) over both; a null counts as absent.
    Raises ConfigError for an override that the family does not have, ModelError for damaged files."""
    processor = _read(Path(folder) / "processor_config.json")
    nested = processor.get("image_processor")
    image = nested if isinstance(nested, dict) else _read(Path(folder) / "preprocessor_config.json")
    known = {**defaults, **{name: value for name, value in image.items() if name in defaults and value is not None}}
    for name, value in (overrides or {}).items():
        if name not in defaults:
            raise ConfigError(
                f"mm_processor_kwargs has {name!r}, which this model's image processor does not have; it has "
                f"{', '.join(sorted(defaults))}"
            )
        known[name] = value
    return Settings(known, processor, hf_config)


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
