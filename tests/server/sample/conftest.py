"""Helpers shared by these tests live beside them as plain modules (importlib mode adds no folder to the path)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
