"""Somebody else who uses the server."""

from __future__ import annotations

import json
import threading
import time

import httpx

PROMPT = "The quick brown fox"


class Neighbour(threading.Thread):
    """Streams one long greedy answer after the other, and keeps book of what it sees."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.texts: list[str] = []
        self.longest_gap = 0.0
        self.error: Exception | None = None
        self.stopping = False

    def run(self) -> None:
        body = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}
        try:
            while not self.stopping:
                text, last = "", time.monotonic()
                with httpx.stream("POST", self.url + "/v1/completions", json=body, timeout=30) as response:
                    assert response.status_code == 200
                    for line in response.iter_lines():
                        now = time.monotonic()
                        self.longest_gap, last = max(self.longest_gap, now - last), now
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
