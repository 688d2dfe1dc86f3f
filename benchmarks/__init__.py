"""Measurements, run as `make bench WHAT=name ARGS=...`; WHAT=list lists them. See docs/benchmarks.md."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # they share the tests' support
