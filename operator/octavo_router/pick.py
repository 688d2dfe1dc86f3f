"""Choose the replica for a request. Pure: no clock, no I/O, no Envoy.

A conversation (a session that the client names, or prompts that grow) stays where its last turn was, as long as that
replica has not far more to do than others. A new one gets
a home: of the replicas that have no more than their share of live conversations, the first in the order that its key
gives, so that routers which know nothing of each other agree; or the one that knows far more of its beginning.

Even homes are what keeps caches of limited size from evicting what is still needed; requests are spilled only where
they would wait.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field

from octavo_router.blocks import BLOCK_ENDS, Prompt

# Found with benchmarks/routing: lower ones agree less between routers, higher ones are less even.
HOME_SHARE = 1.1  # of the mean live conversations: above that a replica is no new one's home
LOAD_FACTOR = 1.25  # of the mean requests in flight, unless told otherwise: above that a conversation moves on,
SPILL_FLOOR = 8  # but never below so many, which no replica makes wait long
DEEPER = 0.25  # of a prompt: to know so much more of it makes another replica the home
SHORT = 8  # blocks: an answer may be longer than such a request, and so hide that the next one continues it
LIVE_SECONDS = 600.0  # a conversation without a request for so long is over
MAX_BLOCKS = 2**17  # known, of all replicas of all pools together
MAX_CONVERSATIONS = 2**15
_FEW = 2**8  # of either, which a pool always has
ALTERNATIVES = 2
SESSION = "="  # begins the key of a session that the client has named
# Keys of a conversation: its session; the end of its last request; while that is short its key, too.
Name = str | int | tuple[str, int]


class _Replica:
    """The prefixes of one replica, as far as they are known. `blocks`: an LRU, in which a prefix outlives what follows
    it."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.live = 0
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def matched(self, blocks: Sequence[int]) -> int:
        """Return how many bytes of the first blocks are here."""
        return BLOCK_ENDS[bisect_left(blocks, True, key=lambda one: one not in self.blocks)]

    def learn(self, blocks: Sequence[int], most: int) -> None:
        for one in reversed(blocks):
            self.blocks[one] = None
            self.blocks.move_to_end(one)
        while len(self.blocks) > most:
            self.blocks.popitem(last=False)


@dataclass
class _Last:
    """The last request of a conversation. Several that have said the same so far are known by the same."""

    text: int
    seconds: float
    count: Counter[str] = field(default_factory=Counter)  # by replica: conversations that went there


@dataclass(frozen=True)
class Pick:
    """`order`: the replica, then where to go if it fails. `reason`: home, conversation, match, or spill. `matched`: the
    share of the prompt that is known at the replica."""

    order: tuple[str, ...]
    reason: str
    matched: float
    replica: _Replica = field(repr=False, compare=False)


class Picker:
    """Picks for one pool of replicas. Not thread-safe."""

    def __init__(self) -> None:
        self.share = 1.0  # of what all pools of a router may know together
        self.load_factor = LOAD_FACTOR
        self._replicas: dict[str, _Replica] = {}
        self._last: OrderedDict[Name, _Last] = OrderedDict()  # the oldest first

    @property
    def replicas(self) -> list[str]:
        """All that may be picked."""
        return list(self._replicas)

    @property
    def in_flight(self) -> dict[str, int]:
        """Return the number of requests that were sent to each replica and have not ended."""
        return {name: one.in_flight for name, one in self._replicas.items()}

    @property
    def under_way(self) -> int:
        """Requests in flight, of all replicas."""
        return sum(one.in_flight for one in self._replicas.values())

    @property
    def known_blocks(self) -> int:
        """The size of the index."""
        return sum(len(one.blocks) for one in self._replicas.values())

    def set_replicas(self, names: Iterable[str]) -> None:
        """Set the replicas that are healthy now. The prefixes of one that went away are forgotten: it may come back
        empty."""
        wanted = set(names)
        gone = set(self._replicas) - wanted
        if gone:
            for name, last in list(self._last.items()):
                for replica in gone & last.count.keys():
                    del last.count[replica]
                if not last.count:
                    del self._last[name]
        self._replicas = {name: self._replicas.get(name) or _Replica() for name in sorted(wanted)}

    def pick(self, key: str, prompt: Prompt, now: float, among: Set[str] | None = None) -> Pick | None:
        """The replica for a request that begins now, which counts until `end`. `key`: of its conversation, or empty;
        one that begins with SESSION is nobody else's. What has been asked before in the same words is another
        conversation's beginning. `among`: the replicas that have its adapter; None, or none
        of those that there are: all alike.
        `now`: seconds, never falling. None: there is no replica."""
        if not self._replicas:
            return None
        self._forget(now)
        blocks = prompt.blocks
        able = [name for name in self._replicas if among is None or name in among] or list(self._replicas)
        last = self._conversation(key, prompt)
        before = None
        if last is not None:
            before = min(self._last[last].count, key=lambda name: self._load(name, key))
        if before in able:
            pick, reason = before, "conversation"
        else:
            pick, reason = self._home(key, blocks, able) if blocks or key else (self._idlest(key, able), "home")
        floor = SPILL_FLOOR if blocks or last is not None else 1  # so short a prompt is as fast elsewhere
        if self._is_busy(pick, floor):
            idlest = self._idlest(key, able)
            if not self._is_busy(idlest, floor):
                pick, reason = idlest, "spill"
        chosen = self._replicas[pick]
        matched = chosen.matched(blocks) / BLOCK_ENDS[len(blocks)] if blocks else 0.0
        if last is not None and before is not None:
            self._take(last, before)
        self._note(self._name(key, prompt), pick, prompt.text, now)
        chosen.learn(blocks, self._bounded(MAX_BLOCKS) // len(self._replicas))
        chosen.in_flight += 1
        return Pick((pick, *self._others(pick, blocks, key, able)), reason, matched, chosen)

    def end(self, pick: Pick) -> None:
        """The request has ended."""
        pick.replica.in_flight -= 1

    def _load(self, name: str, key: str) -> tuple[int, int, bytes]:
        one = self._replicas[name]
        return one.in_flight, one.live, _rank(key, name)

    def _idlest(self, key: str, able: Sequence[str]) -> str:
        return min(able, key=lambda name: self._load(name, key))

    def _is_busy(self, name: str, floor: int = SPILL_FLOOR) -> bool:
        mean = (self.under_way + 1) / len(self._replicas)
        return self._replicas[name].in_flight >= max(math.ceil(self.load_factor * mean), floor)

    def _conversation(self, key: str, prompt: Prompt) -> Name | None:
        """Return the name of the conversation that this request continues."""
        for name in self._names(key, prompt):
            if name in self._last:
                asked_again = prompt.text != 0 and self._last[name].text == prompt.text and not isinstance(name, str)
                return None if asked_again else name
        return None

    def _names(self, key: str, prompt: Prompt) -> Iterator[Name]:
        """Return the possible names of the conversation that this request continues, the latest turn first."""
        if key.startswith(SESSION):
            yield key
            return
        yield from reversed(prompt.ends)
        if key and prompt.blocks:
            yield from ((key, one) for one in reversed(prompt.blocks[: SHORT - 1]))
            yield key, 0

    def _name(self, key: str, prompt: Prompt) -> Name | None:
        """Return the name of a conversation whose last request this is; None if it cannot be told from others."""
        if key.startswith(SESSION):
            return key
        if key and len(prompt.blocks) < SHORT:
            return key, prompt.blocks[-1] if prompt.blocks else 0
        return prompt.ends[-1] if prompt.ends else None

    def _home(self, key: str, blocks: Sequence[int], able: Sequence[str]) -> tuple[str, str]:
        live = sum(self._replicas[name].live for name in able)
        most = math.ceil(HOME_SHARE * (live + 1) / len(able))
        with_room = [name for name in able if self._replicas[name].live < most]
        home = max(with_room, key=lambda name: _rank(key, name))
        matched = {name: self._replicas[name].matched(blocks) for name in with_room}
        best = max(with_room, key=lambda name: matched[name])
        if matched[best] - matched[home] >= max(1, DEEPER * BLOCK_ENDS[len(blocks)]):
            return best, "match"
        return home, "home"

    def _others(self, pick: str, blocks: Sequence[int], key: str, able: Sequence[str]) -> list[str]:
        def cost(name: str) -> tuple[object, ...]:
            return name not in able, self._is_busy(name), -self._replicas[name].matched(blocks), self._load(name, key)

        return sorted((name for name in self._replicas if name != pick), key=cost)[:ALTERNATIVES]

    def _note(self, name: Name | None, pick: str, text: int, now: float) -> None:
        if name is not None:
            last = self._last.setdefault(name, _Last(text, now))
            self._last.move_to_end(name)
            last.text, last.seconds = text, now
            last.count[pick] += 1
            self._replicas[pick].live += 1
        while len(self._last) > self._bounded(MAX_CONVERSATIONS):
            self._drop(next(iter(self._last)))

    def _take(self, name: Name, replica: str) -> None:
        """One of those goes on, and will be known by something else."""
        last = self._last[name]
        last.count[replica] -= 1
        self._replicas[replica].live -= 1
        if not last.count[replica]:
            del last.count[replica]
        if not last.count:
            del self._last[name]

    def _bounded(self, most: int) -> int:
        return max(_FEW, int(most * self.share))

    def _drop(self, name: Name) -> None:
        for replica, count in self._last.pop(name).count.items():
            self._replicas[replica].live -= count

    def _forget(self, now: float) -> None:
        while self._last:
            oldest = next(iter(self._last))
            if self._last[oldest].seconds > now - LIVE_SECONDS:
                return
            self._drop(oldest)


def _rank(key: str, replica: str) -> bytes:
    """Rendezvous hashing: equal in every router."""
    return hashlib.blake2b(f"{key}\0{replica}".encode(errors="surrogatepass"), digest_size=8).digest()
