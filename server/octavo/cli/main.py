"""``octavo COMMAND``. Each command is a module of its own, imported when it is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

from octavo.errors import OctavoError
from octavo.flags.fields import with_dashes
from octavo.flags.parser import CommandParser
from octavo.system.suggestions import did_you_mean
from octavo.version import __version__

COMMANDS = {
    "run": "Talk to a model in the terminal, or have one question answered.",
    "chat": "Talk to a model in the terminal: another name of run, with -q.",
    "serve": "Serve a model behind OpenAI's API.",
    "dashboard": "Open a page to chat with a model, compare and measure it.",
    "list": "List the models on this machine.",
    "ls": "List the models on this machine: another name of list.",
    "show": "Say what a model on this machine is.",
    "fetch": "Fetch a model and keep it on this machine.",
    "pull": "Fetch a model: another name of fetch.",
    "rm": "Remove a model from this machine.",
    "plan": "Say what a model takes of a device, and how many sequences fit.",
    "check": "Say what becomes of every flag of another server's command line.",
    "decisions": "Calibrate the answers of /v1/decisions.",
    "run-batch": "Answer a file of requests, without a server.",
    "bench": "Measure a server or an engine.",
    "version": "Print the version.",
    "help": "Explain a command.",
}


def main(argv: list[str] | None = None) -> int:
    """Run a command. Errors meant for people are one line on stderr; the status is 1, or 2 for a wrong command line."""
    argv = sys.argv[1:] if argv is None else argv
    command = argv[0] if argv else None
    if command not in COMMANDS:
        return _top_level(argv)
    module = import_module(f"octavo.cli.{command.replace('-', '_')}")
    parser = CommandParser(prog=f"octavo {command}", description=COMMANDS[command])
    module.add_arguments(parser)
    return run_command(lambda: module.run(parser.parse_args(with_dashes(argv[1:]))))


def run_command(command: Callable[[], int]) -> int:
    """Run a command, with one-line messages instead of stack traces for mistakes of the user."""
    try:
        return command()
    except OctavoError as error:
        print(f"octavo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        return 1


def _top_level(argv: list[str]) -> int:
    parser = CommandParser(prog="octavo", description="Serve large language models.")
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text)
    if argv and not argv[0].startswith("-"):
        known = did_you_mean(argv[0], COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        parser.error(f"there is no command {argv[0]!r}{known}")
    parser.parse_args(argv)  # prints help, the version or an error, and leaves
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
