"""Snapshots: states that are kept of cached prefixes, found by what they have seen, evicted by what they save.

A snapshot takes as much memory as the keys and values of thousands of tokens, and saves the tokens since the snapshot
before it. It is worth ``level + credit``: credit is what it saves divided by what its memory would hold of keys and
values, 1 at most; a block of these is worth ``level + 1`` when its last holder leaves it. What is worth least goes
first (as in GreedyDual, Young 1994), and raises ``level`` by its credit times its share of the pool. So what has half
the credit stays half as long, and a flood of worthless entries hardly ages others. What clients want kept goes after
all of that, in the order in which its time ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count as counting

from octavo.core.state_slot import RETAINED, Snapshot
from octavo.interface.messages import StateStats

Tokens = tuple[int, ...]


class Snapshots:
    """All snapshots: an index, and a queue of those that no sequence holds."""

    def __init__(self, num_tokens: int) -> None:
        """``num_tokens``: whose keys and values take as much memory as a state."""
        self.level = 0.0  # 1 more once as much has been evicted as the pool holds
        self.num_idle = 0  # snapshots that no sequence holds
        self.num_offered = 0  # snapshots that can be found
        self.num_retained = 0  # snapshots that clients want kept
        self.now = 0.0  # seconds, of the step
        self.stats = StateStats()  # counts since they were last read
        self._num_tokens = num_tokens
        self._by_parent: dict[bytes, list[Snapshot]] = {}
        self._starts = Counter[int]()  # how many there are behind so many tokens in whole blocks
        self._queue: list[tuple[float, int, Snapshot]] = []
        self._serials = counting(1)
        self._ends: list[tuple[float, int, Snapshot]] = []  # of those that are kept, the first to end first

    def __iter__(self) -> Iterator[Snapshot]:
        return (snapshot for found in self._by_parent.values() for snapshot in found)

    def credit(self, snapshot: Snapshot) -> float:
        """The share that a snapshot saves for its memory, from 0 to 1."""
        base = snapshot.base
        while base is not None and base.slot is None:
            base = base.base
        snapshot.base = base
        gap = snapshot.position - (base.position if base is not None else 0)
        return min(1.0, gap / self._num_tokens)

    def worth(self, snapshot: Snapshot) -> float:
        """The worth of a snapshot now."""
        return RETAINED + snapshot.end if snapshot.end else snapshot.level + self.credit(snapshot)

    # -- retention -------------------------------------------------------------------------------------------------

    def retain(self, snapshot: Snapshot, seconds: float) -> None:
        """Keep a snapshot for that time after each use from now on, unless it is to be kept for longer."""
        if seconds >= snapshot.seconds and snapshot.slot is not None:
            self.num_retained += not snapshot.seconds
            snapshot.seconds = seconds
            self._prolong(snapshot)
            if snapshot.serial:
                self._push(snapshot)

    def _prolong(self, snapshot: Snapshot) -> None:
        if snapshot.seconds:
            snapshot.end = self.now + snapshot.seconds
            if len(self._ends) > 2 * self.num_retained + 64:  # most of them were prolonged since
                self._ends = [entry for entry in self._ends if entry[0] == entry[2].end]
                heapify(self._ends)
            heappush(self._ends, (snapshot.end, next(self._serials), snapshot))

    def begin_step(self, now: float) -> None:
        """Note the time, in seconds; what was to be kept until then is worth what it saves."""
        self.now = now
        while self._ends and self._ends[0][0] <= now:
            end, _, snapshot = heappop(self._ends)
            if snapshot.end == end:
                self._release(snapshot)
                if snapshot.serial:
                    self._push(snapshot)

    def _release(self, snapshot: Snapshot) -> None:
        self.num_retained -= snapshot.seconds > 0
        snapshot.seconds = snapshot.end = 0.0

    # -- the index ---------------------------------------------------------------------------------------------------

    def offer(self, snapshot: Snapshot, parent_hash: bytes, tokens: Tokens) -> bool:
        """Let it be found behind the whole blocks ``parent_hash`` and ``tokens`` more. False: another one is."""
        found = self._by_parent.setdefault(parent_hash, [])
        if any(other.tokens == tokens for other in found):
            return False
        found.append(snapshot)
        snapshot.parent_hash, snapshot.tokens = parent_hash, tokens
        self.num_offered += 1
        start = snapshot.position - len(tokens)
        self._starts[start] += 1
        count(self.stats.taken, snapshot.point)
        return True

    def starts(self, until: int) -> list[int]:
        """Numbers of tokens in whole blocks behind which there are any, up to ``until``, the largest first."""
        return sorted((start for start in self._starts if start <= until), reverse=True)

    def behind(self, parent_hash: bytes, tokens: Tokens) -> list[Snapshot]:
        """Snapshots behind the whole blocks ``parent_hash`` and none or some of ``tokens``, the longest first."""
        found = self._by_parent.get(parent_hash)
        if found is None:
            return []
        matching = [one for one in found if tokens[: len(one.tokens)] == one.tokens]
        return sorted(matching, key=lambda one: -len(one.tokens))

    def all_behind(self, parent_hash: bytes) -> list[Snapshot]:
        """Snapshots whose last whole blocks these are."""
        return list(self._by_parent.get(parent_hash, ()))

    def forget(self, snapshot: Snapshot) -> None:
        """Forget a snapshot."""
        self.take(snapshot)
        self._release(snapshot)
        snapshot.slot = None
        if snapshot.parent_hash is not None:
            found = self._by_parent[snapshot.parent_hash]
            found.remove(snapshot)
            if not found:
                del self._by_parent[snapshot.parent_hash]
            snapshot.parent_hash = None
            self.num_offered -= 1
            start = snapshot.position - len(snapshot.tokens)
            self._starts[start] -= 1
            if not self._starts[start]:
                del self._starts[start]

    # -- the queue ---------------------------------------------------------------------------------------------------

    def leave(self, snapshot: Snapshot) -> None:
        """Nobody holds it any more: it may be evicted."""
        self.num_idle += 1
        snapshot.level = self.level
        self._prolong(snapshot)
        self._push(snapshot)

    def _push(self, snapshot: Snapshot) -> None:
        if len(self._queue) > 2 * self.num_idle + 64:  # most of them are of the past
            self._queue = [entry for entry in self._queue if entry[2].serial == entry[1]]
            heapify(self._queue)
        snapshot.serial = next(self._serials)
        heappush(self._queue, (self.worth(snapshot), snapshot.serial, snapshot))

    def take(self, snapshot: Snapshot) -> None:
        """Somebody holds it: it is not evicted."""
        if snapshot.serial:
            snapshot.serial = 0
            self.num_idle -= 1

    def renew(self, snapshot: Snapshot) -> None:
        """It belongs to a conversation that goes on."""
        snapshot.level = self.level
        self._prolong(snapshot)
        if snapshot.serial:
            self._push(snapshot)

    def cheapest(self) -> tuple[float, Snapshot] | None:
        """The one that is worth least of those that nobody holds, with its worth now: as others go, it saves more."""
        queue = self._queue
        while queue:
            worth, serial, snapshot = queue[0]
            if snapshot.serial != serial:
                heappop(queue)
                continue
            now = self.worth(snapshot)
            if now <= worth:
                return worth, snapshot
            heapreplace(queue, (now, serial, snapshot))
        return None

    def take_stats(self, num_running: int) -> StateStats:
        """Counts since the last call, and gauges."""
        stats, self.stats = self.stats, StateStats()
        stats.num_running, stats.num_snapshots = num_running, self.num_offered
        return stats

    def check_integrity(self) -> None:
        """Raise AssertionError when index and queue contradict each other."""
        for parent_hash, found in self._by_parent.items():
            assert found, "an empty list of snapshots was kept"
            assert len({one.tokens for one in found}) == len(found), "a snapshot is there twice"
            assert all(one.parent_hash == parent_hash and one.slot is not None for one in found), "a stale snapshot"
        assert sum(map(len, self._by_parent.values())) == self.num_offered
        assert self._starts == Counter(one.position - len(one.tokens) for one in self), "starts lost count"
        live = {snapshot for _, serial, snapshot in self._queue if snapshot.serial == serial}
        assert len(live) == self.num_idle, "the queue of snapshots lost count"
        assert all((snapshot.end > 0) == (snapshot.seconds > 0) for snapshot in self), "one is kept without an end"
        assert all(snapshot.slot is not None and not snapshot.slot.holders for snapshot in live), "one in use is queued"


def count(counts: dict[str, int], point: str) -> None:
    """Count one more of a point."""
    counts[point] = counts.get(point, 0) + 1
