"""The flags of every command, from their parsers."""

from __future__ import annotations

import argparse
import importlib
import re

from generate import markdown
from octavo.cli.main import COMMANDS
from octavo.flags.parser import CommandParser

_DEFAULT = re.compile(r"\s*\(default: (.*)\)$", re.DOTALL)


def parser(command: str) -> argparse.ArgumentParser:
    module = importlib.import_module(f"octavo.cli.{command.replace('-', '_')}")
    found = CommandParser(prog=f"octavo {command}", description=COMMANDS[command])
    module.add_arguments(found)
    return found


def serve_page() -> str:
    parts = [
        f"{COMMANDS['serve']} `octavo serve [MODEL] [flags]`, or `python -m octavo.entrypoints.openai.api_server`. A "
        "default that depends on the device is given for each. Keys of a `--config` file are these names without the "
        "leading dashes. `octavo.LLM` takes those of the engine as keyword arguments, with underscores. Numbers take "
        "units, see [the command line](../command-line.md).",
    ]
    for group in parser("serve")._action_groups:
        if group._group_actions:
            parts += [f"## {_title(group.title or '')}", _table(group._group_actions)]
    return markdown.page("Flags of octavo serve", *parts)


def other_pages() -> str:
    parts = []
    for command in COMMANDS:
        if command == "serve":
            continue
        found = parser(command)
        parts += [f"## octavo {command}", COMMANDS[command], _table(found._actions)]
        for action in found._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, inner in action.choices.items():
                    parts += [f"### octavo {command} {name}", inner.description or "", _table(inner._actions)]
    return markdown.page("Flags of the other commands", *parts)


def _title(title: str) -> str:
    return title[:1].upper() + title[1:]


def _table(actions: list[argparse.Action]) -> str:
    shown = [
        action
        for action in actions
        if action.help not in (None, argparse.SUPPRESS)
        and not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    ]
    return markdown.table(("flag", "value", "default", "meaning"), map(_row, shown)) if shown else ""


def _row(action: argparse.Action) -> tuple[str, str, str, str]:
    names = " ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
    text = (action.help or "").replace("%%", "%")
    default = _DEFAULT.search(text)
    text = _DEFAULT.sub("", text)
    return names, _value(action), markdown.prose(default[1]) if default else "", markdown.prose(text)


def _value(action: argparse.Action) -> str:
    if not action.option_strings or action.nargs == 0:
        return ""
    if action.choices is not None:
        return markdown.code(", ".join(map(str, action.choices)))
    metavar = action.metavar or getattr(action.type, "__name__", action.dest.upper())
    return markdown.code(str(metavar).strip("{}").replace(",", ", ")) + (" ..." if action.nargs == "+" else "")
