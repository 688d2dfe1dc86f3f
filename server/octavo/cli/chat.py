"""``octavo chat``: talk to a model in the terminal. Uses a running server, or starts one for the conversation."""

from __future__ import annotations

import argparse
import os
import sys

from octavo.cli.chat_input import number
from octavo.errors import ConfigError
from octavo.fetch.model_names import DEFAULT_MODEL, check_model_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `octavo chat`."""
    add_chat_flags(parser)
    parser.add_argument(
        "-q",
        "--quick",
        metavar="MESSAGE",
        help="Send one message, print the answer and exit: another way to give PROMPT (default: a conversation)",
    )


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    """Add the arguments and flags that `octavo run` has too."""
    parser.usage = "%(prog)s [MODEL] [PROMPT] [flags]"
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="Model to start a server for; with --url a model of that server, or the question's first word "
        f"(default: {DEFAULT_MODEL}, the embedded model)",
    )
    parser.add_argument(
        "prompt",
        nargs="*",
        metavar="PROMPT",
        help="Question to answer; paths of pictures in it are sent as pictures. Piped standard input is appended to it "
        "(default: a conversation)",
    )
    parser.add_argument(
        "--url", help="URL of a running server to use, as http://127.0.0.1:8000/v1 (default: a server is started)"
    )
    parser.add_argument("--model-name", help="Model name in requests (default: the first that the server lists)")
    parser.add_argument(
        "--api-key",
        type=str.strip,
        metavar="KEY",
        default=os.environ.get("OPENAI_API_KEY"),
        help="API key of the server (default: OPENAI_API_KEY of the environment, else none)",
    )
    parser.add_argument("--system-prompt", help="System prompt of the conversation (default: the chat template's)")
    parser.add_argument(
        "--max-tokens", type=int, help="Maximum number of tokens per answer (default: a quarter of the context)"
    )
    parser.add_argument(
        "--temperature",
        type=number,
        help="Sampling temperature (default: the model's recommended sampling parameters; without any 0.7, with top_p "
        "0.9 and min_p 0.05)",
    )
    parser.add_argument("--verbose", action="store_true", help="Print the speed of each answer (default: off)")


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends. Raises OctavoError."""
    if args.quick is not None and args.prompt:
        raise ConfigError(f"there are two questions, {args.quick!r} and {' '.join(args.prompt)!r}: ask one")
    if args.url is None:
        check_model_name(args.model)
    if args.url is None and sys.stderr.isatty():
        print(f"starting {args.model or DEFAULT_MODEL} ...", file=sys.stderr, flush=True)
    from octavo.cli.chat_session import talk  # what it imports takes longer than finding that a name is wrong

    return talk(args)
