"""Read the settings of an image processor from a checkpoint's files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, ModelError, OctavoError
from octavo.interface.config_checks import shown_value
from octavo.interface.vision_config import VisionConfig, vision_config
from octavo.system.file_reading import read_json

_JOINED, _OWN = "processor_config.json", "preprocessor_config.json"
# Defaults of image processors that families share with others.
_BY_TYPE: Mapping[str, Mapping[str, Any]] = {
    "SiglipImageProcessor": {
        "image_mean": (0.5,) * 3,
        "image_std": (0.5,) * 3,
        "size": {"height": 224, "width": 224},
        "do_center_crop": False,
    }
}


@dataclass(frozen=True)
class Settings:
    """``image``: of the image processor (preprocessor_config.json), ``processor``: of what joins text and images
    (processor_config.json), ``model``: config.json; ``asked``: the user's own among the first."""

    image: dict[str, Any]
    processor: dict[str, Any]
    model: Mapping[str, Any]
    source: str
    asked: frozenset[str] = frozenset()

    @property
    def vision(self) -> Mapping[str, Any]:
        """config.json's part about the encoder of images."""
        vision = self.model.get("vision_config")
        return vision if isinstance(vision, Mapping) else {}

    def tower(self, kinds: tuple[str, ...]) -> VisionConfig:
        """Return config.json's section of the vision encoder, one of ``kinds``. Raises ModelError."""
        return vision_config(self.model, self.source, kinds)

    def agree(self, name: str, stated: Any, expected: Any) -> None:
        """Raise ConfigError or ModelError for a setting (None: it is not there) that is not the model's own."""
        if stated is not None and stated != expected:
            raise self.error(name, f"must be {expected}, as config.json has it, got {shown_value(stated)}")

    def error(self, name: str, text: str) -> OctavoError:
        """One that names the setting ``name``, to be raised."""
        if name in self.asked:
            return ConfigError(f"mm_processor_kwargs: {name} {text}; leave it out")
        return ModelError(
            f"{self.source}: the image processor's {name} {text}; correct the file or fetch the model again"
        )

    def size(self, name: str = "size", square: bool = False) -> dict[str, int]:
        """A size as a dict of named edges; a bare number is the shorter edge, or with ``square`` both."""
        value = self.image[name]
        if isinstance(value, int):
            value = {"height": value, "width": value} if square or name != "size" else {"shortest_edge": value}
        if isinstance(value, (list, tuple)) and len(value) == 2:
            value = {"height": value[0], "width": value[1]}
        found = {key: edge for key, edge in value.items() if edge is not None} if isinstance(value, dict) else {}
        if not found or not all(isinstance(edge, int) and edge > 0 for edge in found.values()):
            raise self.error(name, f"must name edges in pixels, got {shown_value(self.image[name])}")
        return found

    def check(self) -> None:
        """Raise ConfigError or ModelError for settings that all families have and that cannot be meant."""
        for name, value in self.image.items():
            if name.startswith("do_") and not isinstance(value, bool):
                raise self.error(name, f"must be true or false, got {shown_value(value)}")
        for name in ("image_mean", "image_std"):
            values = self.image[name]
            if not isinstance(values, (list, tuple)) or len(values) != 3 or not all(map(_is_number, values)):
                raise self.error(name, f"must be three numbers, got {shown_value(values)}")
        if not all(self.image["image_std"]):
            raise self.error("image_std", f"must not be 0, got {shown_value(self.image['image_std'])}")
        if not _is_number(self.image["rescale_factor"]):
            raise self.error("rescale_factor", f"must be a number, got {shown_value(self.image['rescale_factor'])}")
        if type(self.image["resample"]) is not int or not 0 <= self.image["resample"] <= 5:
            raise self.error("resample", f"must be Pillow's number of a filter, got {self.image['resample']!r:.60}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def read_settings(
    folder: str | Path,
    hf_config: Mapping[str, Any],
    defaults: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """The checkpoint's files over ``defaults``, ``overrides`` (mm_processor_kwargs) over both; a null counts as absent.
    Raises ConfigError for an override that the family does not have, ModelError for damaged files."""
    processor = _read(Path(folder) / _JOINED)
    nested = processor.get("image_processor")
    image = nested if isinstance(nested, dict) else _read(Path(folder) / _OWN)
    kind = str(image.get("image_processor_type"))
    known = {**defaults, **next((values for name, values in _BY_TYPE.items() if kind.startswith(name)), {})}
    known = {name: known[name] for name in defaults}
    known |= {name: value for name, value in image.items() if name in defaults and value is not None}
    for name, value in (overrides or {}).items():
        if name not in defaults:
            raise ConfigError(
                f"mm_processor_kwargs has {name!r}, which this model's image processor does not have; it has "
                f"{', '.join(sorted(defaults))}"
            )
        known[name] = value
    settings = Settings(known, processor, hf_config, str(folder), frozenset(overrides or ()))
    settings.check()
    return settings


def why_no_settings(folder: str | Path) -> str | None:
    """Explain why a checkpoint has no settings of an image processor; None if it has them."""
    path = Path(folder)
    if (path / _OWN).exists() or isinstance(_read(path / _JOINED).get("image_processor"), dict):
        return None
    return (
        f"{folder} has neither {_OWN} nor an image_processor in {_JOINED}, which say how images are read; fetch the "
        "model again"
    )


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
