"""Locations of a model's files on this machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NO_TOKENIZER = "no-tokenizer.txt"  # in the folder derived from a GGUF file: why there is no tokenizer.json


@dataclass(frozen=True)
class ModelFiles:
    """A model that has been found or fetched.

    ``directory`` holds config.json, tokenizer.json, tokenizer_config.json and the like; for a GGUF file it is the
    folder derived from its header. ``format`` is "safetensors" or "gguf"; ``weights`` may be empty when only dummy
    weights are asked for. ``tokenizer_directory`` is set when the tokenizer comes from somewhere else than the model.
    """

    model: str  # the name under which it is served
    format: str
    directory: str
    weights: tuple[str, ...] = ()
    tokenizer_directory: str | None = None
    sampling: dict[str, float] = field(default_factory=dict)  # recommended by an alias where the files say nothing

    @property
    def path(self) -> Path:
        """``directory``."""
        return Path(self.directory)

    @property
    def tokenizer_path(self) -> Path:
        """The directory of tokenizer.json."""
        return Path(self.tokenizer_directory or self.directory)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelFiles:
        """The inverse of dataclasses.asdict, also after JSON."""
        return cls(**{**data, "weights": tuple(data["weights"])})
