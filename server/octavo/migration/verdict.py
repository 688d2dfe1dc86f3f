"""The verdict on one part of another server's command line."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """The fates of a flag."""

    TAKEN = "taken"
    RENAMED = "another name"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True)
class Verdict:
    """``given``: as it was written; ``text``: the reason, the other name, or what to give instead; ``arguments``: what
    `octavo serve` is given for it."""

    given: str
    status: Status
    text: str = ""
    arguments: tuple[str, ...] = ()
