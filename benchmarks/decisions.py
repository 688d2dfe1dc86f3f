"""Questions about one input: 400 decisions in one request, and the same 400 questions as chats of one letter.

    python -m benchmarks decisions        # two minutes on two cores

One server of the embedded model. The input has 4,000 tokens; 20 chats run at a time, and all of them find it in the
prefix cache, as the decisions do. Each is run with an input of its own, then the other; the faster of two runs counts.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.peers.engines import Engine, serve_octavo
from benchmarks.peers.server import Server
from octavo.chat.decisions.questions import read_questions
from octavo.chat.decisions.wording import asked

MODEL = "smollm2-135m-instruct"
TEXT = (Path(__file__).parents[1] / "docs/serving.md").read_text()
CHARACTERS = 15_000  # about 4,000 tokens
QUESTIONS = 400
USERS = 20
ROUNDS = 2


def questions() -> list[dict[str, Any]]:
    """Predicates, choices and scores in turns, each with words of its own."""
    words = sorted(set(TEXT.split()))
    levels = [{"label": label} for label in ("not at all", "a little", "much")]
    found: list[dict[str, Any]] = []
    for at in range(QUESTIONS):
        word, other = words[at % len(words)], words[(7 * at + 1) % len(words)]
        found.append(
            (
                {"type": "predicate", "instructions": f"The text says {word}."},
                {
                    "type": "choice",
                    "instructions": "Which matters?",
                    "choices": [{"value": word}, {"value": f"x{other}"}],
                },
                {"type": "score", "instructions": f"How much is it about {word}?", "levels": levels},
            )[at % 3]
        )
    return found


async def decide(client: httpx.AsyncClient, text: str) -> None:
    body = {"model": MODEL, "input": text, "questions": questions()}
    (await client.post("/v1/decisions", json=body)).raise_for_status()


async def chat(client: httpx.AsyncClient, text: str) -> None:
    turns = [asked(question)[0] for question in read_questions(questions(), lambda part, where: None)]

    async def one(turn: str) -> None:
        messages = [{"role": "user", "content": f"{text}\n\n{turn}"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 1, "temperature": 0}
        (await client.post("/v1/chat/completions", json=body)).raise_for_status()

    await one(turns[0])  # it reads the text; the others wait, or each would
    limit = asyncio.Semaphore(USERS)

    async def within(turn: str) -> None:
        async with limit:
            await one(turn)

    await asyncio.gather(*map(within, turns[1:]))


async def measure(port: int) -> dict[str, list[float]]:
    """Seconds of each way."""
    seconds: dict[str, list[float]] = {"decisions": [], "chats": []}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
        for at in range(ROUNDS):
            for name, way in (("decisions", decide), ("chats", chat)):
                started = time.perf_counter()
                await way(client, f"({name} {at}) {TEXT[:CHARACTERS]}")
                seconds[name].append(time.perf_counter() - started)
    return seconds


def main() -> None:
    engine = Engine("Octavo", "", serve_octavo(), model=MODEL)
    with Server(engine) as server:
        seconds = asyncio.run(measure(server.port))
    decisions, chats = (min(seconds[name]) for name in ("decisions", "chats"))
    print(
        f"{QUESTIONS} questions: decisions {decisions:.1f} s, chats {chats:.1f} s, {chats / decisions:.2f} times",
        seconds,
    )


if __name__ == "__main__":
    main()
