"""Checks of config.json and GGUF metadata: every number that sizes, loops or divides is checked before it is used.

A file comes from anywhere, and one number in it can ask for all memory, or for memory that is not there. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from octavo.errors import ModelError

# Well above what any model has, and low enough for what is computed from them.
MAX_VOCAB = 1 << 24
MAX_WIDTH = 1 << 20  # of hidden states and of what lies between two layers of an MLP
MAX_LAYERS = 1024
MAX_EXPERTS = 4096  # of a layer
MAX_HEADS = 4096
MAX_HEAD_SIZE = 1024
MAX_POSITIONS = 1 << 27
MAX_STREAMS = 16  # of hidden states (AltUp)
MAX_WINDOW = (1 << 31) - 1  # kernels count positions in 32 bits
MIN_FACTOR, MAX_FACTOR = 1e-6, 1e6  # of a rope scaling

Name = Callable[[str], str]


class Fields:
    """Checked values of one table. Raises ModelError, which names the field as ``name`` does."""

    def __init__(self, config: dict[str, Any], source: str, name: Name) -> None:
        self.config, self.source, self.name = config, source, name

    def inner(self, key: str, table: dict[str, Any]) -> Fields:
        """The fields of ``table``, an object within this one."""
        return Fields(table, self.source, partial(_inner_name, self.name, key))

    def integer(self, key: str, low: int, high: int, optional: bool = False) -> Any:
        """The integer, from ``low`` to ``high``; None where it is optional and not set."""
        value = self.config.get(key)
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            kind = "a positive integer up to" if low == 1 else f"an integer from {low} to"
            self.refuse(key, f"must be {kind} {high}")
        return value

    def number(self, key: str, low: float, high: float, above: bool = False) -> Any:
        """The finite number from ``low`` (not itself, if ``above``) to ``high``; None where it is not set."""
        value = self.config.get(key)
        if value is None:
            return None
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
        if not fits or not math.isfinite(value) or (above and value == low):
            limits = f"above {low:g} and up to" if above else f"from {low:g} to"
            self.refuse(key, f"must be a number {limits} {high:g}")
        return value

    def flag(self, key: str) -> Any:
        """The bool; None where it is not set."""
        value = self.config.get(key)
        if not isinstance(value, (bool, type(None))):
            self.refuse(key, "must be true or false")
        return value

    def text(self, key: str) -> Any:
        """The string; None where it is not set."""
        value = self.config.get(key)
        if not isinstance(value, (str, type(None))):
            self.refuse(key, "must be a string")
        return value

    def table(self, key: str) -> dict[str, Any] | None:
        """The object, or None where it is not set."""
        value = self.config.get(key)
        if not isinstance(value, (dict, type(None))):
            self.refuse(key, "must be an object")
        return value

    def token_ids(self, key: str) -> Any:
        """The token id or the list of them; None where it is not set."""
        value = self.config.get(key)
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < MAX_VOCAB:
                self.refuse(key, f"must be a token id, or a list of them, from 0 to {MAX_VOCAB - 1}")
        return value

    def refuse(self, key: str, demand: str) -> None:
        """Raise ModelError: the field must be ``demand``."""
        shown = shown_value(self.config.get(key))
        raise self.error(f"{self.name(key)} {demand}, got {shown}")

    def error(self, text: str) -> ModelError:
        """A ModelError of this source, to be raised."""
        return ModelError(f"{self.source}: {text}; correct the file or fetch the model again")


def _inner_name(name: Name, outer: str, inner: str) -> str:
    return name(f"{outer}.{inner}")


def shown_value(value: Any) -> str:
    """A value as an error message shows it: one short line."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**20:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
