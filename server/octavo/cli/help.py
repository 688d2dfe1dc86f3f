"""``octavo help [COMMAND]``."""

from __future__ import annotations

import argparse

from octavo.cli import main


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command to explain."""
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="Command to explain (default: list them all)")


def run(args: argparse.Namespace) -> int:
    """Print what `octavo COMMAND --help` prints."""
    return main.main([*args.command, "--help"])
