"""Which cases `make test` runs of a test that combines parameters: few, with every value or every pair of values."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from zlib import crc32

Case = Mapping[str, str]  # parameter -> value


def sample(cases: Mapping[str, Case], strength: int) -> set[str]:
    """Names of cases that together hold every ``strength`` values that any case has together.

    Choose greedily; of equals, the one whose name hashes lowest, so that values meet in no order of theirs.
    """
    names = sorted(cases, key=lambda name: crc32(name.encode()))
    held = {name: {*combinations(sorted(cases[name].items()), min(strength, len(cases[name])))} for name in names}
    missing = set().union(*held.values())
    chosen = set()
    while missing:
        best = max(held, key=lambda name: len(held[name] & missing))
        chosen.add(best)
        missing -= held.pop(best)
    return chosen
