"""Hourly prices of devices, from a file of the user's: there are none by default."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.plan.gpus import find_gpu
from octavo.plan.workload import Outlook


@dataclass(frozen=True)
class Price:
    """The price of one device, or of one machine without GPUs."""

    per_hour: float
    currency: str


@dataclass(frozen=True)
class Cost:
    """The cost of a plan. ``per_million``: output tokens at the planned rate, on a device that is never idle."""

    per_hour: float
    per_million: float | None
    currency: str

    def as_json(self) -> dict[str, Any]:
        """The cost as `octavo plan --json` has it."""
        million = None if self.per_million is None else round(self.per_million, 4)
        return {"per_hour": round(self.per_hour, 4), "per_million_output_tokens": million, "currency": self.currency}


def read_price(path: str, device: str) -> Price:
    """Read the price of ``device``: a title of `GPUS`, or "cpu". The file has lines as ``h100 = 2.99``, by the names
    that ``--gpu`` takes, and may name its ``currency`` (USD). Raises ConfigError."""
    try:
        said = tomllib.loads(Path(path).expanduser().read_text())
    except OSError as error:
        raise ConfigError(f"--prices: cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"--prices: {path} is not TOML: {' '.join(str(error).split())}") from None
    currency = said.pop("currency", "USD")
    if not isinstance(currency, str):
        raise ConfigError(f'--prices: {path}: currency must be a text, as "EUR", got {currency!r}')
    found = None
    for name, price in said.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < math.inf:
            raise ConfigError(f"--prices: {path}: {name} must be what an hour costs, above 0, got {price!r}")
        if _title(name) == device:
            found = Price(float(price), currency)
    if found is None:
        raise ConfigError(f"--prices: {path} has no price of {device}; add a line as h100 = 2.99, or cpu = 0.4")
    return found


def cost_of(price: Price, devices: int, seen: Outlook | None) -> Cost:
    """The cost of so many devices, and of the tokens that a workload gets from them."""
    per_hour = price.per_hour * devices
    million = per_hour / 3600 / seen.tokens_per_second * 1e6 if seen is not None else None
    return Cost(per_hour, million, price.currency)


def _title(name: str) -> str:
    try:
        return name if name == "cpu" else find_gpu(name).title
    except ConfigError:
        return name  # one that is not known here, of a longer list
