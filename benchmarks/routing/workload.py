"""Conversations, and a client that holds all of them at once and notes what each request met."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_COMMON = "the of and to in is that for it as was with be by on not he his but at are this have from or had an they"
WORDS = _COMMON.split()


REPLICAS, CACHE_SHARE = 4, 0.4  # each cache holds such a share of all that a run says
# Of emulated replicas, by whether they are saturated: requests at once, and tokens of prompts a second.
PACES: dict[bool, dict[str, Any]] = {False: {"slots": 16, "prefill": 20000}, True: {"slots": 8, "prefill": 4000}}


@dataclass(frozen=True)
class Workload:
    """``system`` characters that all conversations share (of so many ``systems``), ``turn`` more with each turn."""

    name: str
    sessions: int = 40
    turns: int = 10
    system: int = 1200
    turn: int = 800
    systems: int = 1
    hot: bool = False  # the first question is the same in all of them, too
    completions: bool = False  # /v1/completions: one text instead of messages
    tokens: bool = False  # the same as token ids, for routers that know tokens alone
    max_tokens: int = 20

    @property
    def saturated(self) -> bool:
        """Whether replicas are so slow that requests wait for each other."""
        return self.name.endswith("saturated")

    @property
    def characters(self) -> int:
        """All different characters of a run: what an endless cache would hold."""
        first = self.turn if self.hot else self.turn * self.sessions
        return self.systems * self.system + first + self.sessions * self.turn * (self.turns - 1)


WORKLOADS = {
    one.name: one
    for one in (
        Workload("sessions"),
        Workload("completions", completions=True),
        Workload("tokens", completions=True, tokens=True),
        Workload("systems", systems=8),
        Workload("hot", hot=True),
        Workload("sessions, saturated", sessions=80, turns=6),
        Workload("hot, saturated", sessions=80, turns=6, hot=True),
    )
}


@dataclass
class Measured:
    """What one run saw. Seconds; tokens."""

    ttft: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    failed: int = 0

    def percentile(self, share: float) -> float:
        ordered = sorted(self.ttft)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def text(seed: object, characters: int) -> str:
    """Words drawn from the seed, exactly so long."""
    rng, words, length = random.Random(str(seed)), [], 0
    while length < characters:
        words.append(f"{rng.choice(WORDS)}{rng.randrange(1000)}")
        length += len(words[-1]) + 1
    return " ".join(words)[:characters]


def conversation(workload: Workload, seed: int, number: int) -> list[dict[str, Any]]:
    """The bodies of its requests. Answers in it are written already, so that every router gets the same texts."""
    system = text((seed, "system", number % workload.systems), workload.system)
    messages: list[dict[str, str]] = [{"role": "system", "content": system}]
    bodies = []
    for turn in range(workload.turns):
        about = (seed, "hot") if workload.hot and turn == 0 else (seed, number, turn)
        said = text(about, workload.turn)
        if turn:
            half = workload.turn // 2
            messages = [*messages, {"role": "assistant", "content": said[:half]}]
            said = said[half:]
        messages = [*messages, {"role": "user", "content": said}]
        prompt: dict[str, Any] = {"messages": messages}
        if workload.completions:
            joined = "\n".join(one["content"] for one in messages)
            prompt = {"prompt": list(joined.encode()) if workload.tokens else joined}
        bodies.append(
            {
                "model": "tiny",
                **prompt,
                "max_tokens": workload.max_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
    return bodies


async def _ask(http: aiohttp.ClientSession, url: str, body: dict[str, Any], measured: Measured) -> None:
    started, first, usage, ended = time.perf_counter(), None, None, False
    try:
        async with http.post(url, json=body) as answer:
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                if first is None:
                    first = time.perf_counter() - started
                if b"[DONE]" in line:
                    ended = True
                elif b'"usage"' in line:
                    usage = json.loads(line[6:]).get("usage") or usage
    except (aiohttp.ClientError, OSError):
        pass
    if first is None or usage is None or not ended:
        measured.failed += 1
        return
    measured.ttft.append(first)
    measured.prompt_tokens += usage["prompt_tokens"]
    measured.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def run(workload: Workload, port: int, seed: int) -> Measured:
    """All conversations begin within a second; each asks again as soon as it is answered."""
    measured = Measured()
    rng = random.Random(seed)
    path = "completions" if workload.completions else "chat/completions"
    url = f"http://127.0.0.1:{port}/v1/{path}"
    timeout = aiohttp.ClientTimeout(total=900)

    async def hold(number: int, delay: float) -> None:
        bodies = conversation(workload, seed, number)
        await asyncio.sleep(delay)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            for body in bodies:
                await _ask(http, url, body, measured)

    await asyncio.gather(*(hold(number, rng.random()) for number in range(workload.sessions)))
    return measured
