"""How good the first answers are: 20 plain questions, three seeds each, through `octavo chat` as it comes.

    python -m benchmarks plain_questions [MODEL] [--show] [-- FLAG ...]

An answer is good if it ends by itself (chat has not cut it), says nothing over and over (no run of ten words comes a
third time, and no line that is longer than a word or two a fourth), is English as the question is (nine in ten of its
letters are ASCII, and of its words at least one in eight is among the commonest of English, answers of up to four words
beside numbers excepted) and speaks of what was asked: one of the words that stand behind the question comes in it.
Flags after -- go to `octavo chat` (`--temperature 1` is how an API without the model's own parameters would answer).
Exit status 1 below 45 of the 60.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter

SEEDS = (1, 2, 3)
ENOUGH = 0.75
QUESTIONS = {
    "What is the capital of Japan?": "tokyo",
    "What color is the sky?": "blue",
    "What is 2+2?": "4|four",
    "Who wrote Romeo and Juliet?": "shakespeare",
    "How many days are in a week?": "7|seven",
    "What do bees make?": "honey|wax",
    "What is the largest planet in the solar system?": "jupiter",
    "What is water made of?": "hydrogen|oxygen",
    "How do I boil an egg?": "water|egg|eggs|boil",
    "Explain gravity to a child.": "gravity|pull|pulls|force|earth",
    "Why do leaves change color in autumn?": "leaves|chlorophyll",
    "Name three fruits.": "apple|apples|banana|bananas|orange|oranges|strawberry|strawberries|mango|grapes",
    "Write a short poem about the sea.": "sea|ocean|wave|waves|shore",
    "What is Python used for?": "programming|language|data|web|software",
    "Tell me a fact about cats.": "cat|cats|feline",
    "How can I sleep better?": "sleep|bed|bedtime",
    "Write a birthday greeting for my mother.": "birthday|mother|mom|mum",
    "What is the difference between a lake and a river?": "lake|lakes|river|rivers",
    "Summarize what a computer does in one sentence.": "computer|computers|data|information",
    "Hello, how are you?": "hello|hi|help|assist|fine|well|thank|thanks|good|great",
}
COMMON = frozenset(
    re.findall(
        r"\w+",
        "the of and to a in is that for it as was with be by on not you are at from or an have they which one we but "
        "can their there this has were all your when i my its will more if so about how do other like what our",
    )
)


def problem(question: str, answer: str) -> str | None:
    """Why an answer is not good; None if it is."""
    text = answer.strip()
    if "(cut" in text.rpartition("\n")[2]:
        return "cut"
    words = re.findall(r"[^\W_]+", text.lower())
    if not words:
        return "empty"
    runs = Counter(tuple(words[i : i + 10]) for i in range(len(words) - 9))
    lines = Counter(line.strip().lower() for line in text.splitlines() if len(line.split()) > 2)
    if max(runs.values(), default=0) > 2 or max(lines.values(), default=0) > 3:
        return "over and over"
    letters = [letter for letter in text if letter.isalpha()]
    if sum(letter.isascii() for letter in letters) < 0.9 * len(letters):
        return "not English"
    if sum(not word.isdigit() for word in words) > 4 and sum(word in COMMON for word in words) < len(words) / 8:
        return "not English"
    return None if re.search(rf"\b({QUESTIONS[question]})\b", text.lower()) else "of something else"


def answers(model: str | None, flags: list[str]) -> list[str]:
    """Those of one `octavo chat`, in the order of questions and seeds; each in a conversation of its own."""
    lines = [f"/clear\n/set seed {seed}\n{question}\n" for question in QUESTIONS for seed in SEEDS]
    command = [sys.executable, "-m", "octavo.cli.main", "chat", *([model] if model else []), *flags]
    done = subprocess.run(command, input="".join(lines), stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.split("(forgotten)\n")[1:]


def main() -> int:
    """Prints a line a question and the count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="Model to talk to (default: the embedded one)")
    parser.add_argument("--show", action="store_true", help="Print every answer")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="Flags of `octavo chat`")
    args = parser.parse_args()
    found = iter(answers(args.model, args.flags))
    problems: list[str | None] = []
    for question in QUESTIONS:
        mine = [(answer, problem(question, answer)) for answer in (next(found) for _ in SEEDS)]
        problems += [why for _, why in mine]
        print(f"{sum(why is None for _, why in mine)}  {question}  {', '.join(why for _, why in mine if why)}")
        for answer, why in mine if args.show else ():
            print(f"--- {why or 'good'}\n{answer.strip()}")
    good = sum(why is None for why in problems)
    print(f"{good} of {len(problems)} answers are good")
    return 0 if good >= ENOUGH * len(problems) else 1


if __name__ == "__main__":
    sys.exit(main())
