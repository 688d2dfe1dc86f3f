"""``octavo check 'vllm serve ...'``: what becomes of every flag of another server's command line."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter

from octavo.errors import ConfigError
from octavo.migration.check import Checked, check
from octavo.migration.verdict import Status

_MOST = 1_000_000  # characters of a command
_WIDTH = 60  # of the column of flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `octavo check`."""
    parser.usage = "%(prog)s [--json] 'vllm serve MODEL ...'"
    parser.add_argument("--json", action="store_true", help="Print one JSON object (default: lines)")
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="Command line of vLLM (also python -m, docker run), Ollama, llama-server or text-generation-launcher, "
        "best in quotes. Nothing is started, and neither the model nor files are looked at (default: read from stdin)",
    )


def run(args: argparse.Namespace) -> int:
    """Print a line for every flag; the status is 0 if all of it would run, else 1. Raises ConfigError."""
    if args.command:
        text = args.command[0] if len(args.command) == 1 else shlex.join(args.command)
    elif sys.stdin.isatty():
        raise ConfigError("check needs a command line: octavo check 'vllm serve org/name --max-model-len 8192'")
    else:
        text = sys.stdin.read(_MOST)
    checked = check(text)
    print(_as_json(checked) if args.json else _as_lines(checked))
    return 0 if checked.runs else 1


def _as_json(checked: Checked) -> str:
    verdicts = [{"given": one.given, "status": one.status, "text": one.text} for one in checked.verdicts]
    return json.dumps({"server": checked.server, "runs": checked.runs, "command": checked.command, "flags": verdicts})


def _as_lines(checked: Checked) -> str:
    width = max((len(_short(one.given)) for one in checked.verdicts), default=0)
    lines = []
    for one in checked.verdicts:
        text = f": {one.text}" if one.text else ""
        lines.append(f"  {_short(one.given).ljust(width)}  {one.status}{text}")
    counts = Counter(one.status for one in checked.verdicts)
    told = ", ".join(f"{counts[status]} {status}" for status in Status if counts[status])
    end = "It would run" if checked.runs else "It would not start as it is; without what is refused it is"
    return "\n".join([f"{checked.server}: {told or 'no flags'}", *lines, f"{end}: {checked.command}"])


def _short(given: str) -> str:
    return given if len(given) <= _WIDTH else given[: _WIDTH - 3] + "..."
