"""The parser of every command: a mistake is one line on stderr, with the flag that was meant where one is near."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from octavo.flags.keys import with_joined_keys, with_plain_switches
from octavo.flags.vllm_flags import judge_unknown_flag
from octavo.system.suggestions import did_you_mean


class CommandParser(argparse.ArgumentParser):
    """Exits with status 2 after a line on stderr that begins with ``octavo: error:``; no usage is printed.

    Half a flag is none: it would mean another one when flags are added, and gets past whoever looks for the whole.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})
        self.takes_vllm_flags = False
        self.source = ""  # where the arguments come from, if not from the command line
        self._refused: list[str] = []

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with status 2."""
        print(f"octavo: error: {'; '.join([*self._refused, self.source + _plain(message)])}", file=sys.stderr)
        sys.exit(2)

    def refuse(self, problem: str) -> None:
        """Go on reading, so that one error names this problem and those that come."""
        if (problem := self.source + _plain(problem)) not in self._refused:
            self._refused.append(problem)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            self.refuse(str(error))
            return None

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse all arguments, or exit with an error that names every flag and value that cannot be taken."""
        known, unknown = self.parse_known_args(args, namespace)
        problems = [*self.refusals(), *self._problems(unknown)]
        self._refused.clear()
        if problems:
            self.error("; ".join(dict.fromkeys(problems)))
        return known

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse, with vLLM's forms of arguments where its flags are taken."""
        if self.takes_vllm_flags:
            args = with_plain_switches(sys.argv[1:] if args is None else args, self._option_string_actions)
            args = with_joined_keys(args, self._option_string_actions)
        return super().parse_known_args(args, namespace)

    def refusals(self) -> list[str]:
        """Return the refusals that `refuse` was told of, here and in the parsers of subcommands."""
        found = list(self._refused)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found += [one for parser in action.choices.values() for one in parser.refusals()]
        return found

    def _problems(self, unknown: list[str]) -> Iterator[str]:
        flags = [argument.partition("=")[0] for argument in unknown if _is_flag(argument)]
        for flag in flags:
            judged = judge_unknown_flag(flag) if self.takes_vllm_flags else None
            if judged is None:
                yield f"unknown flag {flag}{did_you_mean(flag, self.flags()) or f'; see {self.prog} --help'}"
            elif judged:
                yield judged
        if unknown and not flags:  # beside an unknown flag they may be its values
            yield f"unexpected argument {unknown[0]!r}; see {self.prog} --help"

    def flags(self) -> list[str]:
        """Every flag in its long form."""
        found = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found += [flag for parser in action.choices.values() for flag in parser.flags()]
        return found


def _plain(message: str) -> str:
    return message.removeprefix("argument ") if message.startswith("argument -") else message


def _is_flag(argument: str) -> bool:
    return argument.startswith("-") and argument.strip("-") != "" and not argument[1:2].isdigit()
