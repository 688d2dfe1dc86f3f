"""Reads a pod's metrics page: vLLM's names, so pods of vLLM itself are understood too. Pure.

Only a handful of lines out of thousands is wanted, and they are found by one regular expression that looks at every
byte once: no page, however long or strange, holds up the event loop for more than milliseconds.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

MAX_BYTES = 4 * 2**20  # a page of ours has 20 KiB

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
MAX_RUNNING = "octavo:max_num_seqs"

_NAMES = (RUNNING, WAITING, KV_USAGE, MAX_RUNNING)
_SAMPLE = re.compile(  # *+ and ++ never go back: each byte is looked at once
    rb"^("
    + "|".join(map(re.escape, _NAMES)).encode()
    + rb')(?:\{(?:[^"}\n]++|"(?:[^"\\\n]++|\\.)*+")*+\})?+[ \t]++(\S++)',
    re.MULTILINE,
)


class BadPage(ValueError):
    """A page that does not say how loaded the pod is; the message says what is wrong with it."""


@dataclass(frozen=True)
class Load:
    """What one replica is doing: counts of sequences."""

    running: float
    waiting: float
    kv_usage: float | None = None  # 0 to 1
    max_running: float | None = None  # most that it is configured to run at once

    @property
    def demand(self) -> float:
        return self.running + self.waiting


def parse(page: bytes) -> Load:
    """Sums over the engines of a pod (data parallel ranks), of which there is usually one. Raises BadPage."""
    found: dict[str, list[float]] = {name: [] for name in _NAMES}
    for match in _SAMPLE.finditer(page):
        name = match[1].decode()
        try:
            value = float(match[2])
        except ValueError:
            raise BadPage(f"{name} is {_shown(match[2])}, not a number") from None
        if not math.isfinite(value) or value < 0:
            raise BadPage(f"{name} is {_shown(match[2])}, not a number of requests")
        found[name].append(value)
    for name in (RUNNING, WAITING):
        if not found[name]:
            raise BadPage(f"the page has no {name}: is it an engine that answers there?")
    usage, limit = found[KV_USAGE], found[MAX_RUNNING]
    return Load(
        running=sum(found[RUNNING]),
        waiting=sum(found[WAITING]),
        kv_usage=sum(usage) / len(usage) if usage else None,
        max_running=sum(limit) if limit else None,
    )


def _shown(text: bytes) -> str:
    return repr(text[:40].decode(errors="replace"))
