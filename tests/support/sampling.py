"""Which cases `make test` runs of a test that combines parameters: few, with every value or every pair of values."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path
from zlib import crc32

Case = Mapping[str, str]  # parameter -> value


def sample(cases: Mapping[str, Case], strength: int) -> set[str]:
    """Names of cases that together hold every ``strength`` values that any case has together.

    Choose greedily; of equals, the one whose name hashes lowest, so that values meet in no order of theirs.
    """
    names = sorted(cases, key=_hash)
    held = {name: {*combinations(sorted(cases[name].items()), min(strength, len(cases[name])))} for name in names}
    missing = set().union(*held.values())
    chosen = set()
    while missing:
        best = max(held, key=lambda name: len(held[name] & missing))
        chosen.add(best)
        missing -= held.pop(best)
    return chosen


def share_of(names: Iterable[str], share: int, draw: int) -> set[str]:
    """One name in ``share``, at least one: ``share`` draws that follow each other have all of them."""
    ordered = sorted(names, key=_hash)
    count = min(share, len(ordered))
    return set(ordered[draw % count :: count]) if count else set()


def draw_of_commit(root: Path) -> int:
    """A number that each commit has another of; 0 where there is no repository."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        ).stdout
        return int(found[:8], 16)
    except (OSError, subprocess.CalledProcessError):
        return 0


def _hash(name: str) -> int:
    return crc32(name.encode())
