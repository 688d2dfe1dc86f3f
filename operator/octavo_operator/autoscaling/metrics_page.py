"""Parses a pod's metrics page. The names are vLLM's, so pods of vLLM itself work too. Pure.

Only a few of thousands of lines are needed. One regular expression finds them and looks at every byte once, so no page,
however long or malformed, blocks the event loop for more than milliseconds.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from octavo_operator.observed.pod_starts import EngineStart

MAX_BYTES = 4 * 2**20  # the engine's page has 20 KiB

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
MAX_RUNNING = "octavo:max_num_seqs"
FINISHED = "vllm:request_success_total"

_NAMES = (RUNNING, WAITING, KV_USAGE, MAX_RUNNING, FINISHED)
_SAMPLE = re.compile(  # *+ and ++ never backtrack: each byte is looked at once
    rb"^("
    + "|".join(map(re.escape, _NAMES)).encode()
    + rb')(?:\{(?:[^"}\n]++|"(?:[^"\\\n]++|\\.)*+")*+\})?+[ \t]++(\S++)',
    re.MULTILINE,
)


_FORMAT = re.compile(
    rb'^octavo:chat_format_info\{(?:[^}\n]*,)?tool_format="([\w.-]{1,64})"[^}\n]*\}[ \t]', re.MULTILINE
)
_STARTUP = re.compile(rb'^octavo:startup_seconds\{(?:[^}\n]*,)?phase="(\w+)"[^}\n]*\}[ \t]+(\S+)', re.MULTILINE)


class MetricsPageError(ValueError):
    """A page without the pod's load; the message says what is wrong with it."""


@dataclass(frozen=True)
class Load:
    """Number of sequences in one replica."""

    running: float
    waiting: float
    kv_usage: float | None = None  # 0 to 1
    max_running: float | None = None  # configured maximum
    finished: float = 0  # since the replica started

    @property
    def demand(self) -> float:
        """All requests in the replica."""
        return self.running + self.waiting


def parse(page: bytes) -> Load:
    """The load of a pod: summed over its engines (data parallel ranks). Raises MetricsPageError."""
    found: dict[str, list[float]] = {name: [] for name in _NAMES}
    for match in _SAMPLE.finditer(page):
        name = match[1].decode()
        try:
            value = float(match[2])
        except ValueError:
            raise MetricsPageError(f"{name} is {_shown(match[2])}, not a number") from None
        if not math.isfinite(value) or value < 0:
            raise MetricsPageError(f"{name} is {_shown(match[2])}, not a number of requests")
        found[name].append(value)
    for name in (RUNNING, WAITING):
        if not found[name]:
            raise MetricsPageError(f"the page has no {name}: is that an engine?")
    usage, limit = found[KV_USAGE], found[MAX_RUNNING]
    return Load(
        running=sum(found[RUNNING]),
        waiting=sum(found[WAITING]),
        kv_usage=sum(usage) / len(usage) if usage else None,
        max_running=sum(limit) if limit else None,
        finished=sum(found[FINISHED]),
    )


def engine_start(page: bytes) -> EngineStart:
    """Seconds of the phases of an engine's start, of several engines (data parallel ranks) the slowest; and the format
    of tool calls that it has found."""
    out: dict[str, float] = {}
    for match in _STARTUP.finditer(page):
        try:
            value = float(match[2])
        except ValueError:
            continue
        if math.isfinite(value) and value >= 0:
            out[match[1].decode()] = max(value, out.get(match[1].decode(), 0.0))
    found = _FORMAT.search(page)
    return EngineStart(out, found[1].decode() if found else None)


def _shown(text: bytes) -> str:
    return repr(text[:40].decode(errors="replace"))
