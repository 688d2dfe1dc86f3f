"""A short soak: benchmarks/soak.py is the long one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[3] / "benchmarks" / "soak.py"


@pytest.mark.slow
def test_random_load_at_four_times_the_capacity_leaves_nothing_behind():
    result = subprocess.run([sys.executable, SOAK, "--minutes", "0.1"], capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 faults" in result.stdout
