"""What agents are asked, and what a reciting model answers, turn by turn: for the tests, which write the model, and for
`frameworks.py`, which runs elsewhere. It needs no package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MODEL = "reciting"
PROSE = "The page goes on as pages do: a line, one more line, a word or two of the sea and of the hills behind it. " * 2
SYSTEM = "You read pages for others and count words in them. Use the tools. " + PROSE * 3
ERROR = "there is no such page in all of this house"
QUIETLY = " Say so by calls alone."  # behind all that agents hear which know no answer but a call
# How frameworks end what they tell a model of an error, and whether they are of that kind.
ERRORS = {
    ERROR: False,
    ERROR + '"}': False,
    "An error occurred while running the tool. Please try again.": False,
    "\n Please fix your mistakes.": False,
    "    raise LookupError(ERROR)\n": False,
    "you have retried several times, try a completely different approach.": True,
}
Call = tuple[str, dict[str, Any]]  # a tool's name and arguments


@dataclass(frozen=True)
class Turn:
    """What the model says, and what its calls return; a result that is None is an error."""

    thought: str
    text: str
    calls: tuple[Call, ...] = ()
    results: tuple[str | None, ...] = ()


@dataclass(frozen=True)
class Loop:
    question: str
    turns: tuple[Turn, ...]

    @property
    def calls(self) -> list[Call]:
        return [call for turn in self.turns for call in turn.calls]

    @property
    def answer(self) -> str:
        return self.turns[-1].text


def look(page: str) -> Call:
    return "look", {"page": page}


def count(word: str, times: int) -> Call:
    return "count", {"word": word, "times": times}


NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
LOOPS = {
    "one": Loop(
        "Please open the first page of the little book.",
        (
            Turn("I open it.", "I look.", (look("little, é 1"),), ("So soon the little book came to its end.",)),
            Turn("That was all.", "It is short, é 日."),
        ),
    ),
    "two": Loop(
        "Please read both of the maps of the old harbour.",
        (
            Turn(
                "Two at once.",
                "Both, then.",
                (look("north"), count("boats", 3)),
                ("Boats lie north of the pier.", "Three boats: now both maps of the harbour were read."),
            ),
            Turn("Enough.", "Three boats on two maps."),
        ),
    ),
    "thoughts": Loop(
        "Please think for long before you open the drawer.",
        (
            Turn(
                "A drawer may be stuck.\n\n- Pull, then push.\n- Is it so? I think it is.",
                "",
                (look('drawer\n"<b> & c"\n\n  two'),),
                ("A letter was found in the drawer, and that was it.",),
            ),
            Turn("A letter!", "There was a letter in it."),
        ),
    ),
    "error": Loop(
        "Please open the door that was never there.",
        (Turn("I try.", "I try it.", (look("door"),), (None,)), Turn("As I thought.", "No such door.")),
    ),
    "ten": Loop(
        "Please read all ten pages of the long book.",
        (
            *(
                Turn(
                    f"Now page {number}.",
                    f"I read {number}.",
                    (look(f"long {number}"),) if at % 3 else (look(f"long {number}"), count(number, at)),
                    (
                        f"{PROSE}That was page {number} of ten pages of this long book.",
                        *((f"{PROSE}It is there on page {number} as often as that.",) if at % 3 == 0 else ()),
                    ),
                )
                for at, number in enumerate(NUMBERS)
            ),
            Turn("All of them.", "Ten pages were read."),
        ),
    ),
}


def results(quietly: bool) -> dict[str, str | None]:
    """What a call returns, by its name and arguments; None is an error."""
    return {
        key(*call): result and result + quietly * QUIETLY
        for loop in LOOPS.values()
        for turn in loop.turns
        for call, result in zip(turn.calls, turn.results, strict=True)
    }


def key(name: str, arguments: dict[str, Any]) -> str:
    return f"{name} {json.dumps(arguments, sort_keys=True)}"


def scripts() -> dict[str, str]:
    """By the end of a prompt, what the model says there."""
    return dict(_scripts())


def _scripts() -> Iterator[tuple[str, str]]:
    for loop in LOOPS.values():
        cues = {loop.question: False, loop.question + QUIETLY: True}
        for turn in loop.turns:
            for cue, quietly in cues.items():
                end: tuple[Call, ...] = () if turn.calls else (("final_answer", {"answer": turn.text}),)
                said = (turn.thought, "", turn.calls + end) if quietly else (turn.thought, turn.text, turn.calls)
                yield cue, spoken(*said)
            last = turn.results[-1] if turn.results else None
            cues = ERRORS if last is None else {last: False, **{f"{result}{QUIETLY}": True for result in turn.results}}


def spoken(thought: str, text: str, calls: tuple[Call, ...]) -> str:
    """As the template writes it behind `<think>`."""
    made = "\n".join(_call(*call) for call in calls)
    return f"{thought}\n</think>\n\n" + "\n\n".join(part for part in (text, made) if part)


def _call(name: str, arguments: dict[str, Any]) -> str:
    written = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"
