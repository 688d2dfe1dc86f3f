"""``octavo run MODEL [PROMPT]``: `octavo chat`, as people who come from Ollama write it."""

from __future__ import annotations

import argparse

from octavo.cli import chat
from octavo.fetch.model_names import DEFAULT_MODEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `octavo run`."""
    parser.usage = "%(prog)s [MODEL] [PROMPT] [flags]"
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"Model to start a server for (default: {DEFAULT_MODEL}, the embedded model)",
    )
    parser.add_argument(
        "prompt",
        nargs="*",
        metavar="PROMPT",
        help="Question to answer. Piped standard input is appended to it (default: a conversation)",
    )
    chat.add_chat_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Answer the question, or talk until the input ends. Raises OctavoError."""
    args.quick = " ".join(args.prompt) or None
    return chat.run(args)
