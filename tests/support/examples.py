"""How much is drawn: once for `make test`; for `make test-long` (the hypothesis profile `long`) ten times as much,
until it is enough."""

from __future__ import annotations

import os

IS_LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
# So many times the examples that a test names (0.1: a tenth); up to 1, some suites take the same ones every time.
FACTOR = float(os.environ.get("OCTAVO_TEST_EXAMPLES_FACTOR", "10" if IS_LONG else "1"))


_ENOUGH = 10_000


def examples_of(number: int) -> int:
    return max(1, min(round(number * FACTOR), max(number, _ENOUGH)))
