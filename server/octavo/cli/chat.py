"""``octavo chat``: talk to a model in the terminal. Uses a running server, or starts one for the conversation."""

from __future__ import annotations

import argparse
import os
import sys

from octavo.cli.chat_input import number
from octavo.errors import ConfigError, ModelError
from octavo.fetch.model_names import DEFAULT_MODEL, check_model_name, looks_local
from octavo.fetch.offers import Offers


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


def _check_name(model: str | None) -> None:
    """Refuse what is no model; where nothing like it is known, with models of the hub that this machine could run."""
    try:
        check_model_name(model)
    except ModelError as error:
        offered = "" if "did you mean" in str(error) or looks_local(model or "") else Offers().wait()
        raise ModelError(f"{error}; small ones on the hub: {offered}" if offered else str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends. Raises OctavoError."""
    if args.quick is not None and args.prompt:
        raise ConfigError(f"there are two questions, {args.quick!r} and {' '.join(args.prompt)!r}: ask one")
    args.offers = None
    if args.url is None:
        _check_name(args.model)
        if args.model is None and args.quick is None and sys.stdin.isatty() and sys.stdout.isatty():
            args.offers = Offers()  # asked while the server starts
    if args.url is None and sys.stderr.isatty():
        print(f"starting {args.model or DEFAULT_MODEL} ...", file=sys.stderr, flush=True)
    from octavo.cli.chat_session import talk  # what it imports takes longer than finding that a name is wrong

    return talk(args)
