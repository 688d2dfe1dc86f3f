"""Track which of its files Envoy has rejected, and with which words, until it accepts a later update of the same kind.

Its words are in its log alone, of which render/router/router.sh keeps the last in a file. Its counters say whether they
are about clusters or listeners, and when an update was taken last. Envoy is asked for them only when there are new
words, and while something is rejected.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

from octavo_router.management import Answer, json_answer

KINDS = {
    "clusters": ("cluster_manager.cds", "cds.yaml", "cluster(s)"),
    "listeners": ("listener_manager.lds", "lds.yaml", "listener(s)"),
}
_FILTER = r"^(cluster_manager\.cds|listener_manager\.lds)\.update_(failure|rejected|time)$"
_SAID = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3})\].*?\] Filesystem config update \w+: (.*)", re.DOTALL)
_MAX_WORDS = 600
_SECONDS = 1.0
_LOG_SECONDS = 0.2  # on the way from Envoy to the file
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Said:
    """Envoy's words on an update that it did not take. `at`: seconds since the epoch, to the millisecond."""

    at: float
    words: str


@dataclass(frozen=True)
class Counters:
    """Counts of one kind. `bad`: updates that Envoy has rejected or could not read; `taken`: when it took the last one,
    0: it took none."""

    bad: int
    taken: float


def parse_log(text: str) -> list[Said]:
    """Return the entries of the file, the oldest first. An entry may have several lines; times are local, as Envoy
    writes them."""
    found = []
    for entry in re.split(r"\n(?=\[\d{4}-)", text):
        if match := _SAID.match(entry):
            at = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S.%f").timestamp()
            found.append(Said(round(at, 3), " ".join(match[2].split())[:_MAX_WORDS]))
    return found


def parse_counters(text: str) -> dict[str, Counters]:
    """Parse /stats of the admin API. A counter that it does not name is 0."""
    values = {name: int(value) for name, _, value in (line.partition(": ") for line in text.splitlines()) if value}
    return {
        kind: Counters(
            values.get(f"{scope}.update_failure", 0) + values.get(f"{scope}.update_rejected", 0),
            values.get(f"{scope}.update_time", 0) / 1000,
        )
        for kind, (scope, *_) in KINDS.items()
    }


class Rejections:
    """`current`: what is rejected now, by its kind."""

    def __init__(self) -> None:
        self.current: dict[str, Said] = {}
        self._bad: dict[str, int] = {}  # counted until the last update

    def update(self, said: Sequence[Said], counters: Mapping[str, Counters]) -> None:
        """`said`: of the log, read after the counters, so that it has what they count."""
        for kind, seen in counters.items():
            before = self._bad.get(kind, 0)
            if seen.bad < before:  # Envoy has started again
                before = 0
            words = self._about(kind, [one for one in said if one.at > seen.taken])
            if seen.bad > before and words is not None:
                self.current[kind] = words
            elif kind in self.current and seen.taken >= self.current[kind].at:
                del self.current[kind]
            self._bad[kind] = seen.bad

    @staticmethod
    def _about(kind: str, said: Sequence[Said]) -> Said | None:
        """The last rejection of that kind; else the last one that names no kind."""
        _, *own = KINDS[kind]
        others = [mark for other, (_, *marks) in KINDS.items() if other != kind for mark in marks]
        certain = [one for one in said if any(mark in one.words for mark in own)]
        possible = [one for one in said if not any(mark in one.words for mark in others)]
        return max(certain or possible, key=lambda one: one.at, default=None)

    async def page(self, _: dict[str, str]) -> Answer:
        """GET /rejected: by kind, since when, and Envoy's words."""
        return json_answer({kind: {"at": one.at, "words": one.words} for kind, one in self.current.items()})


def read_counters(admin: http.client.HTTPConnection) -> dict[str, Counters]:
    """Asks Envoy. Raises OSError, ValueError, HTTPException."""
    try:
        admin.request("GET", f"/stats?filter={quote(_FILTER)}")
        return parse_counters(admin.getresponse().read().decode())
    finally:
        admin.close()


async def follow(admin_port: int, path: Path, rejections: Rejections) -> None:
    """Follow Envoy until cancelled. Without an answer from Envoy, or while it starts, the last state holds."""
    admin = http.client.HTTPConnection("127.0.0.1", admin_port, timeout=5)
    last: int | None = None
    while True:
        await asyncio.sleep(_SECONDS)
        try:
            stamp = path.stat().st_mtime_ns
        except OSError:  # nothing was rejected yet
            stamp = None
        if stamp == last and not rejections.current:
            continue
        try:
            counters = await asyncio.to_thread(read_counters, admin)
            await asyncio.sleep(_LOG_SECONDS)
            rejections.update(parse_log(path.read_text(errors="replace")) if stamp is not None else [], counters)
            last = stamp
        except (OSError, ValueError, http.client.HTTPException) as error:
            logger.debug("Envoy's counters cannot be read: %s", error)
