"""``octavo version``."""

from __future__ import annotations

import argparse

from octavo.version import __version__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no flags."""


def run(args: argparse.Namespace) -> int:
    """Print what `octavo --version` prints."""
    print(f"octavo {__version__}")
    return 0
