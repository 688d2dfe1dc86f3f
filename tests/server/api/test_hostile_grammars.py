"""Whatever schema, regex or grammar somebody sends: others are served as if nothing were.

`make test-long` tries all of them (10 minutes), one after the other, and also compares how quick the neighbour is.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.hostile_grammars import SAMPLE, Case, cases

LONGEST_GAP = 1.0  # seconds without a token
MEMORY = 100 << 20
HTTP = httpx.Client(timeout=60)  # one for all: to make one holds up the neighbour, a thread of this process


class Neighbour:
    """A client that streams all the time, and one that looks at /health."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._arrivals: list[float] = []
        self._unhealthy: list[str] = []
        self._leaves = threading.Event()
        self._threads = [threading.Thread(target=self._stream), threading.Thread(target=self._watch_health)]

    def __enter__(self) -> Neighbour:
        for thread in self._threads:
            thread.start()
        time.sleep(0.5)
        return self

    def __exit__(self, *_: object) -> None:
        ended = [thread for thread in self._threads if not thread.is_alive()]
        self._leaves.set()
        for thread in self._threads:
            thread.join(90)
        assert not ended, "it was cut off"
        assert not self._unhealthy

    def _stream(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "stream": True, "temperature": 1}
        while not self._leaves.is_set():
            with httpx.stream("POST", self._url + "/v1/completions", json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    if line:
                        self._arrivals.append(time.monotonic())
                    if self._leaves.is_set():
                        break

    def _watch_health(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as http:
            while not self._leaves.wait(0.2):
                if (answer := http.get("/health")).status_code != 200:
                    self._unhealthy.append(answer.text)

    def gaps(self, since: float) -> list[float]:
        arrivals = [since, *(t for t in self._arrivals if t >= since), time.monotonic()]
        return [after - before for before, after in itertools.pairwise(arrivals)]


def memory_of(pid: int) -> int:
    """Bytes in use by a process and all below it, shared ones counted once."""
    try:
        found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended meanwhile
        return 0
    return (int(found[1]) << 10 if found else 0) + sum(memory_of(int(child)) for child in children)


def body_of(case: Case) -> bytes:
    _, kind, value = case
    asked = {"prompt": "x", "max_tokens": 40, "temperature": 1, "seed": 1, "structured_outputs": {kind: value}}
    return json.dumps(asked).encode()


def ask(url: str, name: str, body: bytes) -> None:
    """The answer keeps to the form, or is an error that names the field."""
    answer = HTTP.post(url + "/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400), (name, answer.text[:500])
    if answer.status_code == 400:
        error = answer.json()["error"]
        told = "structured_outputs" in error["message"] and error["param"].startswith("structured_outputs")
        assert told or "not valid JSON" in error["message"], (name, error)


@pytest.fixture(scope="module")
def server(start):
    return start("--kv-cache-memory-bytes", str(16 << 20))


@pytest.fixture
def neighbour(server) -> Iterator[Neighbour]:
    with Neighbour(server.url) as neighbour:
        yield neighbour


def wait_for_memory(pid: int, before: int) -> None:
    until = time.monotonic() + 90
    while (more := memory_of(pid) - before) > MEMORY:
        assert time.monotonic() < until, f"{more >> 20} MB are left"
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.alone
def test_hostile_grammars_hold_nobody_up_and_leave_nothing_behind(server, neighbour):
    every = cases()
    hostile = [(name, body_of(every[name])) for name in SAMPLE]
    ordinary = [("ordinary", body_of(("", "json", {"type": "integer", "maximum": 100 + i}))) for i in range(5)]
    since = time.monotonic()
    ask(server.url, *ordinary[0])  # the first one after a start
    before = memory_of(server.process.pid)
    with ThreadPoolExecutor(10) as clients:
        for at in range(0, len(hostile), 5):
            asked = [clients.submit(ask, server.url, *one) for one in (*hostile[at : at + 5], *ordinary)]
            for one in asked:
                one.result()
    assert max(neighbour.gaps(since)) < LONGEST_GAP
    wait_for_memory(server.process.pid, before)
    # What can freeze, or break, is not in the process that makes the steps.
    assert "llguidance" not in Path(f"/proc/{server.core_pid}/maps").read_text()
    assert "Traceback" not in server.log


@pytest.mark.long
@pytest.mark.alone
def test_each_of_all_hostile_grammars(server, neighbour):
    ask(server.url, "ordinary", body_of(("", "json", {"type": "integer"})))
    before, medians = memory_of(server.process.pid), []
    for name, case in cases().items():
        body, since = body_of(case), time.monotonic()
        time.sleep(0.5)
        alone = statistics.median(neighbour.gaps(since))
        since = time.monotonic()
        ask(server.url, name, body)
        assert time.monotonic() - since < 6, name
        gaps = neighbour.gaps(since)
        assert max(gaps) < LONGEST_GAP, name
        medians.append((statistics.median(gaps) / alone, name))
    wait_for_memory(server.process.pid, before)
    assert statistics.median(ratio for ratio, _ in medians) < 2, sorted(medians)[-10:]
