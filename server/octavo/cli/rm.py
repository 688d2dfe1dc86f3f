"""``octavo rm MODEL``: remove a model from this machine."""

from __future__ import annotations

import argparse
import sys

from octavo.errors import ConfigError
from octavo.fetch.progress import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `octavo rm`."""
    parser.add_argument(
        "model", nargs="+", metavar="MODEL", help="Names of fetched models, as `octavo list` prints them"
    )
    parser.add_argument("-y", "--yes", action="store_true", help="Do not ask (default: ask)")
    parser.add_argument(
        "--download-dir", help="Folder of fetched models (default: the caches of Octavo and Hugging Face)"
    )


def run(args: argparse.Namespace) -> int:
    """Deletes the models' files; 1 where a person says no. Raises ModelError, before anything is deleted."""
    from octavo.fetch.installed import check_not_served, find_installed, remove

    models = [find_installed(name, args.download_dir) for name in args.model]
    for model in models:
        check_not_served(model, args.download_dir)
    for model in models:
        size = format_bytes(model.num_bytes)
        if not args.yes and not _agreed(f"remove {model.name} ({size}, {model.places[0]})? [y/N] "):
            print(f"{model.name} stays", file=sys.stderr)
            return 1
        remove(model, args.download_dir)
        print(f"removed {model.name} ({size})")
    return 0


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("standard input is no terminal, where rm would ask: -y removes without asking")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False
