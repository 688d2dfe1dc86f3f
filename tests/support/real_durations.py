"""Times that are promised, which hold on a machine with nothing else to do: `make test-long` holds to them, one test at
a time. `make test`, whose machine may do other things, waits for what must happen, as long as only a fault takes."""

from __future__ import annotations

import os

import pytest

REAL_DURATIONS = bool(os.environ.get("OCTAVO_REAL_DURATIONS"))
ENDS_SECONDS = 10 if REAL_DURATIONS else 90  # until a server has ended that has lost a part of itself
timed_alone = pytest.mark.alone if REAL_DURATIONS else pytest.mark.slow
