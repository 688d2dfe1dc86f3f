"""``octavo run [MODEL] [PROMPT]``: `octavo chat`, as people who come from Ollama write it."""

from __future__ import annotations

import argparse

from octavo.cli import chat


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `octavo run`."""
    chat.add_chat_flags(parser)
    parser.set_defaults(quick=None)


def run(args: argparse.Namespace) -> int:
    """Answer the question, or talk until the input ends. Raises OctavoError."""
    return chat.run(args)
