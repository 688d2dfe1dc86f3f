"""``octavo decisions calibrate DATA.jsonl``: temperatures for decisions, from questions with known answers."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.chat.decisions.calibration import Row, calibration_file, expected_error, fit_temperature
from octavo.chat.decisions.questions import KINDS
from octavo.errors import ConfigError, FieldError
from octavo.flags.engine_flags import ENGINE_HELP, add_engine_flags
from octavo.text.shown import shown

if TYPE_CHECKING:
    from octavo import LLM

FEWEST = 20  # questions of a type from which a temperature is fitted
_FLOOR = 1e-12  # of a share: none is impossible


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    commands = parser.add_subparsers(title="commands", metavar="{calibrate}", required=True)
    text = "Fit one temperature for each type of question to questions with known answers."
    command = commands.add_parser("calibrate", help=text, description=text)
    command.add_argument(
        "data",
        metavar="DATA.jsonl",
        help='File of questions, one {"input": ..., "questions": [...], "answers": [...]} per line. An answer is true '
        "or false, a choice's value, or a level's label or number from 0",
    )
    command.add_argument("model_tag", nargs="?", metavar="MODEL", help=ENGINE_HELP["model"])
    command.add_argument(
        "-o",
        "--output",
        default="decisions.json",
        metavar="FILE",
        help="File to write, for --decisions-calibration or the model's folder (default: %(default)s)",
    )
    add_engine_flags(command.add_argument_group("engine"))


def run(args: argparse.Namespace) -> int:
    """Fits, prints what changes, and writes the file. Raises OctavoError."""
    lines = _read(args.data)
    rows = _ask(_make_llm(args), lines)
    temperatures = {}
    print(f"{'type':<10}{'questions':>10}{'temperature':>13}{'ECE before':>12}{'after':>8}")
    for kind, own in rows.items():
        if len(own) < FEWEST:
            print(f"{kind:<10}{len(own):>10}  too few: {FEWEST} are needed")
            continue
        temperature = temperatures[kind] = fit_temperature(own)
        before, after = expected_error(own, 1.0), expected_error(own, temperature)
        print(f"{kind:<10}{len(own):>10}{temperature:>13.3f}{before:>12.3f}{after:>8.3f}")
    if not temperatures:
        raise ConfigError(f"{args.data} has fewer than {FEWEST} questions of each type: add some")
    Path(args.output).write_text(json.dumps(calibration_file(temperatures), indent=1) + "\n", encoding="utf-8")
    print(f"written to {args.output}")
    return 0


def _make_llm(args: argparse.Namespace) -> LLM:
    from octavo import LLM
    from octavo.engine.args import EngineArgs
    from octavo.system.logging_setup import setup_logging

    setup_logging("warning", "text", process="decisions")
    given = {name: getattr(args, name) for name in EngineArgs.field_names() if hasattr(args, name)}
    return LLM(**given | ({} if args.model_tag is None else {"model": args.model_tag}))


def _read(path: str) -> list[dict[str, Any]]:
    lines = []
    try:
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                lines.append(_check(json.loads(line), f"{path}:{number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}:{number} is no JSON: {error}") from None
    if not lines:
        raise ConfigError(f'{path} is empty: write lines of {{"input": ..., "questions": [...], "answers": [...]}}')
    return lines


def _check(line: Any, where: str) -> dict[str, Any]:
    if not isinstance(line, dict) or not all(name in line for name in ("input", "questions", "answers")):
        raise ConfigError(f"{where} must be an object with input, questions and answers")
    questions, answers = line["questions"], line["answers"]
    if not isinstance(questions, list) or not isinstance(answers, list) or len(questions) != len(answers):
        raise ConfigError(f"{where} must have two lists of one length, questions and answers")
    return {**line, "where": where}


def _ask(llm: LLM, lines: list[dict[str, Any]]) -> dict[str, list[Row]]:
    """Questions' log-probabilities and right answers, by type."""
    rows: dict[str, list[Row]] = {kind: [] for kind in KINDS}
    for done, line in enumerate(lines):
        if sys.stderr.isatty():
            print(f"\r{done} of {len(lines)} inputs", end="", file=sys.stderr)
        where = line["where"]
        try:
            decision = llm.decide(line["input"], line["questions"], min_mass=0, temperatures={})
        except (FieldError, ValueError) as error:
            raise ConfigError(f"{where}: {error}") from None
        for at, (found, right) in enumerate(zip(decision.answers, line["answers"], strict=True)):
            if found.type == "refusal":
                continue  # no label has any probability
            values, own = _options(found)
            same = [value == right and isinstance(value, bool) == isinstance(right, bool) for value in values]
            if not any(same):
                expected = ", ".join(map(shown, values[:9]))
                raise ConfigError(f"{where}: answers.{at} {shown(right)} is none of {expected}")
            number = same.index(True) % len(own)
            rows[found.type].append(([math.log(max(share, _FLOOR)) for share in own], number))
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    return rows


def _options(found: Any) -> tuple[list[Any], list[float]]:
    """The answers that are allowed, and the options' shares; levels may be named in two ways."""
    if found.type == "predicate":
        return [True, False], [found.probability, 1 - found.probability]
    own = [one.probability for one in found.probabilities]
    if found.type == "choice":
        return [one.value for one in found.probabilities], own
    return [*(one.label for one in found.probabilities), *(one.value for one in found.probabilities)], own
