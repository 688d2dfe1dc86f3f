"""The images' entry point: the commands of ``octavo``, and what vLLM's image takes, a model or flags of ``serve``."""

from __future__ import annotations

import os
import re
import sys

from octavo.cli.main import COMMANDS, main

_OF_OCTAVO = ("--version", "--help", "-h")
_IN_A_MODELS_NAME = re.compile(r"[/:.\d]")  # and in no command's


def command_line(argv: list[str]) -> list[str]:
    """The arguments of ``octavo`` that are meant: ``serve`` goes before a flag, and before what can be no command.

    A misspelt command stays as it is, so that the error names the right one.
    """
    first = argv[0] if argv else "--help"
    if first in COMMANDS or first in _OF_OCTAVO:
        return argv
    if first.startswith("-") or _IN_A_MODELS_NAME.search(first) or os.path.exists(first):
        return ["serve", *argv]
    return argv


if __name__ == "__main__":
    sys.exit(main(command_line(sys.argv[1:])))
