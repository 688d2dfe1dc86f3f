"""A short soak: benchmarks/soak.py is the long one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_random_load_at_four_times_the_capacity_leaves_nothing_behind():
    command = [sys.executable, "-m", "benchmarks", "soak", "--minutes", "0.1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 faults" in result.stdout
