"""How much is drawn: once for `make test`, many times as much for `make test-long` (the hypothesis profile `long`)."""

from __future__ import annotations

import os

IS_LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
# So many times the examples that a test names; with 1, some suites take the same ones every time.
FACTOR = int(os.environ.get("OCTAVO_TEST_EXAMPLES_FACTOR", "10" if IS_LONG else "1"))
