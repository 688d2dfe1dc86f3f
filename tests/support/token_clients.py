"""Clients that count every token: none of a request that was taken on may be missing, and none may be refused."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from typing import Any

import httpx

KINDS = ("stream", "stream, new connection", "answer", "stream, now and then")
PAUSES = (0.0, 0.5, 3.0, 4.8, 5.2, 7.0)  # around the 5 s for which clients keep an idle connection


class TokenClients:
    """So many users, each with a request at a time, over and over. A context manager."""

    def __init__(self, url: str, model: str, users: int = 20) -> None:
        self.url, self.model, self.users = url, model, users
        self.finished: Counter[str] = Counter()  # requests, by kind
        self.tokens = 0
        self.refused: list[str] = []
        self.broken: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()))

    def __enter__(self) -> TokenClients:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Lets everybody finish the request under way."""
        self._stop.set()
        self._thread.join(400)
        assert not self._thread.is_alive(), "a request hangs"

    @property
    def troubles(self) -> list[str]:
        return [*self.refused, *self.broken]

    async def _all(self) -> None:
        await asyncio.gather(*(self._user(number) for number in range(self.users)))

    async def _user(self, number: int) -> None:
        kind = KINDS[number % len(KINDS)]
        chance = random.Random(number)
        client = httpx.AsyncClient(base_url=self.url, timeout=300)
        count = 0
        while not self._stop.is_set():
            if kind == "stream, new connection":
                await client.aclose()
                client = httpx.AsyncClient(base_url=self.url, timeout=300)
            count += 1
            body = {
                "model": self.model,
                "prompt": f"User {number} asks for the {count}. time:",
                "temperature": 0,
                "max_tokens": chance.randint(8, 48),
                "ignore_eos": True,
                "logprobs": 0,
            }
            await (self._answer if kind == "answer" else self._stream)(client, body, kind)
            if kind == "stream, now and then":
                await asyncio.sleep(chance.choice(PAUSES))
        await client.aclose()

    async def _answer(self, client: httpx.AsyncClient, body: dict[str, Any], kind: str) -> None:
        try:
            answer = await client.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            self.refused.append(f"{kind}: {error!r}")
            return
        if answer.status_code != 200:
            self.refused.append(f"{kind}: {answer.status_code} {answer.text[:200]}")
            return
        said = answer.json()
        got = len(said["choices"][0]["logprobs"]["tokens"])
        self._judge(kind, body, got, said["choices"][0]["finish_reason"], said["usage"]["completion_tokens"])

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any], kind: str) -> None:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        got, reason, usage, done, began = 0, None, None, False, False
        try:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    self.refused.append(f"{kind}: {answer.status_code} {(await answer.aread())[:200]!r}")
                    return
                began = True
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: "):
                        event = json.loads(line[6:])
                        usage = event.get("usage") or usage
                        for choice in event.get("choices") or []:
                            got += len((choice.get("logprobs") or {}).get("tokens") or [])
                            reason = choice.get("finish_reason") or reason
        except httpx.HTTPError as error:
            (self.broken if began else self.refused).append(f"{kind}: after {got} tokens: {error!r}")
            return
        self._judge(kind, body, got, reason if done else "no [DONE]", (usage or {}).get("completion_tokens"))

    def _judge(self, kind: str, body: dict[str, Any], got: int, reason: Any, usage: Any) -> None:
        wanted = body["max_tokens"]
        if (got, reason, usage) != (wanted, "length", wanted):
            self.broken.append(f"{kind}: {got} of {wanted} tokens, finish_reason {reason}, usage {usage}")
        self.finished[kind] += 1
        self.tokens += got
