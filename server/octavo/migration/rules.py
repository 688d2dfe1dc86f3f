"""Rules for flags of servers that do not share vLLM's names: a table of rules for each server, and their judge."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from octavo.migration.verdict import Status, Verdict
from octavo.system.suggestions import did_you_mean

SECRETS = ("--api-key", "--hf-token", "-hft", "--api-key-file")


@dataclass(frozen=True)
class Rule:
    """A flag of another server. ``names``: all spellings, divided by spaces; ``values``: how many follow, "?" for one
    that may be absent; ``ours``: the flag that it becomes, "MODEL", or "" for none; ``text``: why it has no effect, or
    what to do instead; ``translate``: our arguments for its value, None if that value is refused."""

    names: str
    values: int | str = 1
    ours: str = ""
    text: str = ""
    refused: bool = False
    translate: Callable[[str], list[str] | None] | None = None

    def judge(self, flag: str, values: list[str]) -> Verdict:
        """Judge the flag with these values."""
        given = " ".join([flag, *(["***"] * len(values) if flag in SECRETS else values)])
        if self.refused:
            return Verdict(given, Status.REFUSED, self.text)
        if self.translate is not None:
            arguments = self.translate(" ".join(values))
            if arguments is None:
                return Verdict(given, Status.REFUSED, self.text)
            if not arguments:
                return Verdict(given, Status.NO_EFFECT, self.text)
            return Verdict(given, Status.RENAMED, " ".join(arguments), tuple(arguments))
        if not self.ours:
            return Verdict(given, Status.NO_EFFECT, self.text)
        if self.ours == "MODEL":
            return Verdict(given, Status.RENAMED, "MODEL", tuple(values[:1]))
        status = Status.TAKEN if flag == self.ours else Status.RENAMED
        return Verdict(given, status, "" if status is Status.TAKEN else self.ours, (self.ours, *values))

    @property
    def outcome(self) -> tuple[Status, str]:
        """The verdict on the flag whatever its value, for the migration page."""
        if self.refused:
            return Status.REFUSED, self.text
        if self.ours:
            same = self.ours in self.names.split()
            return (Status.TAKEN if same else Status.RENAMED), "" if same else self.ours
        return (Status.RENAMED if self.translate is not None else Status.NO_EFFECT), self.text


def keep(names: str, values: int = 1) -> Rule:
    """A flag that has its name here, too: the first of ``names``."""
    return Rule(names, values, names.split()[0])


def refuse(names: str, text: str, values: int | str = 1) -> Rule:
    """A flag that cannot be taken; ``text`` says what to do instead."""
    return Rule(names, values, text=text, refused=True)


def among(flag: str, values: Mapping[str, str]) -> Callable[[str], list[str] | None]:
    """Return the translation to ``flag`` of those values that have a counterpart here; None for the others."""
    return lambda value: [flag, values[value]] if value in values else None


def sampling(names: str, field: str) -> Rule:
    """A default of a sampling parameter."""

    def translate(value: str) -> list[str]:
        return ["--override-generation-config", json.dumps({field: _number(value)})]

    return Rule(names, text="part of --override-generation-config", translate=translate)


def _number(text: str) -> float | int | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def judge(rules: Iterable[Rule], words: list[str], environment: Mapping[str, str], prefix: str = "") -> list[Verdict]:
    """A verdict for every flag among ``words``, and for variables of ``environment`` that stand for flags: their names
    after ``prefix``, in capitals and with underscores."""
    table = {name: rule for rule in rules for name in rule.names.split()}
    found = []
    for name, value in environment.items():
        flag = "--" + name.removeprefix(prefix).lower().replace("_", "-")
        if name.startswith(prefix) and flag in table:
            found.append(table[flag].judge(flag, [value]))
    for flag, values in _split(table, words):
        if not flag:
            found.append(Verdict(values[0], Status.REFUSED, "unexpected: quote a value that has spaces"))
        elif (rule := table.get(flag)) is None:
            found.append(Verdict(" ".join([flag, *values]), Status.REFUSED, f"unknown{did_you_mean(flag, table)}"))
        else:
            found.append(rule.judge(flag, values))
    return found


def _split(table: Mapping[str, Rule], words: list[str]) -> Iterator[tuple[str, list[str]]]:
    words = list(words)
    while words:
        flag, equals, value = words.pop(0).partition("=")
        if not flag.startswith("-"):
            yield "", [flag + equals + value]
            continue
        rule = table.get(flag)
        values = [value] if equals else []
        most = 1 if rule is None or rule.values == "?" else int(rule.values)
        while words and len(values) < most and (most == rule_count(rule) or not words[0].startswith("-")):
            values.append(words.pop(0))
        yield flag, values


def rule_count(rule: Rule | None) -> int:
    """The number of values that a flag must have."""
    return rule.values if rule is not None and isinstance(rule.values, int) else 0
