"""How sizes of a model are shared out to ranks."""

from __future__ import annotations

from octavo.errors import ConfigError

_SHOWN = 8


def divide(total: int, ranks: int, what: str) -> int:
    """``total / ranks``; ConfigError, which names the numbers of ranks that fit, when it does not divide."""
    if total % ranks:
        fitting = [str(size) for size in range(1, min(total, 4096) + 1) if total % size == 0]
        shown = fitting if len(fitting) <= _SHOWN else [*fitting[:_SHOWN], "..."]
        raise ConfigError(
            f"{what} ({total}) cannot be split over {ranks} ranks; choose a tensor parallel size that divides it: "
            f"{', '.join(shown)}"
        )
    return total // ranks
