"""``octavo COMMAND``. Each command is a module of its own, imported when it is asked for."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from importlib.util import find_spec

from octavo import __version__
from octavo.cli.flags import with_dashes
from octavo.errors import OctavoError

COMMANDS = {
    "serve": "serve a model behind OpenAI's API",
    "chat": "talk to a model in the terminal",
    "bench": "measure a server or an engine",
    "plan": "what a model needs and what a machine can run",
    "fetch": "fetch a model and keep it",
}


def main(argv: list[str] | None = None) -> int:
    """Run a command. Errors meant for people are one line on stderr and exit code 1."""
    argv = sys.argv[1:] if argv is None else argv
    command = argv[0] if argv else None
    if command not in COMMANDS:
        return _top_level(argv)
    module = import_module(f"octavo.cli.{command}")
    # Half a flag would mean another one when flags are added, and gets past whoever looks for the whole of it.
    parser = argparse.ArgumentParser(
        prog=f"octavo {command}", description=COMMANDS[command].capitalize() + ".", allow_abbrev=False
    )
    module.add_arguments(parser)
    return run_command(lambda: module.run(parser.parse_args(with_dashes(argv[1:]))))


def run_command(command) -> int:  # type: ignore[no-untyped-def]
    """What every way into a command shares: no stack trace for what a person can put right."""
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
    parser = argparse.ArgumentParser(prog="octavo", description="Serve large language models.")
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in COMMANDS.items():
        if find_spec(f"octavo.cli.{name}") is not None:
            commands.add_parser(name, help=text)
    parser.parse_args(argv)  # prints help or an error, and leaves
    parser.print_help()
    return 0 if not argv else 2


if __name__ == "__main__":
    sys.exit(main())
