"""The error of a context that is longer than what fits."""

from __future__ import annotations

from octavo.errors import ConfigError


class TooLongError(ConfigError):
    """One sequence of the length that is asked for does not fit; one of ``longest`` tokens does (0: none)."""

    def __init__(self, why: str, longest: int, otherwise: str) -> None:
        self._why, self._otherwise = why, otherwise
        fits = f'set --max-model-len to {longest} or less (or "auto"), or ' if longest > 0 else ""
        super().__init__(f"{why}{fits}{otherwise}")

    def with_longest(self, longest: int) -> TooLongError:
        """The error with the length that fits, once that is known."""
        return TooLongError(self._why, longest, self._otherwise)
