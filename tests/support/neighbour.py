"""Somebody else who uses the server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable

import httpx
from support.run_queue import OwnTime

PROMPT = "The quick brown fox"
LOOKS_EVERY = 0.25  # seconds


class Neighbour(threading.Thread):
    """Streams one long greedy answer after the other, and keeps book of what it sees. A gap between two lines counts
    without what this process and ``pids``, the server's, waited for processors that others had."""

    def __init__(self, url: str, pids: Iterable[int] = ()) -> None:
        super().__init__(daemon=True)
        self.url = url
        self._own = OwnTime(pids)
        self.texts: list[str] = []
        self.longest_gap = 0.0
        self.error: Exception | None = None
        self.stopping = False

    def run(self) -> None:
        body = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}
        try:
            while not self.stopping:
                text, last = "", time.monotonic()
                waited, looked = self._own.waited, last
                with httpx.stream("POST", self.url + "/v1/completions", json=body, timeout=90) as response:
                    assert response.status_code == 200
                    for line in response.iter_lines():
                        now = time.monotonic()
                        if (gap := now - last) > self.longest_gap:
                            self.longest_gap = max(self.longest_gap, gap - (self._own.waited - waited))
                        last = now
                        if now - looked > LOOKS_EVERY:
                            waited, looked = self._own.waited, now
                        if line.startswith("data: {"):
                            text += json.loads(line[6:])["choices"][0]["text"]
                assert line == "" or line == "data: [DONE]"
                self.texts.append(text)
        except Exception as error:
            self.error = error

    def check(self, longest_gap: float) -> None:
        """End it: all of its answers were whole, the same, and without a pause of more than so many seconds."""
        self.stopping = True
        self.join(60)
        assert self.error is None
        assert self.texts and len(set(self.texts)) == 1, "the neighbour's answers must all be the same"
        assert self.longest_gap < longest_gap
