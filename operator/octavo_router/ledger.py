"""Requests of tenants by the router that let them in: those under way, and those of the last minute. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from octavo_router.limits import WINDOW_SECONDS

_TICKS = 100  # a second: requests of one are kept together, so that a million of them need 6,000 places
Told = dict[str, tuple[int, list[tuple[int, int]]]]  # by tenant: under way, and how many began so many ticks ago


@dataclass
class _Entry:
    """Requests of one tenant at one router. `begun`: the tick in which a request began, rounded up, and how many
    did."""

    under_way: int = 0
    begun: deque[tuple[int, int]] = field(default_factory=deque)
    many: int = 0  # of them together

    def add(self, tick: int) -> None:
        self.many += 1
        if self.begun and self.begun[-1][0] >= tick:
            self.begun[-1] = (self.begun[-1][0], self.begun[-1][1] + 1)
        else:
            self.begun.append((tick, 1))

    def take_back(self) -> None:
        if self.begun:
            tick, many = self.begun.pop()
            self.many -= 1
            if many > 1:
                self.begun.append((tick, many - 1))

    def forget(self, tick: int) -> None:
        while self.begun and self.begun[0][0] <= tick:
            self.many -= self.begun.popleft()[1]


class Ledger:
    """A router has its own requests here, and those of others, for the tenants of which it decides."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, _Entry]] = {}  # by tenant and router

    def begin(self, tenant: str, router: str, now: float) -> None:
        """A request was let in."""
        entry = self._entries.setdefault(tenant, {}).setdefault(router, _Entry())
        entry.under_way += 1
        entry.add(math.ceil(now * _TICKS))

    def end(self, tenant: str, router: str) -> None:
        """One has ended."""
        entry = self._entries.get(tenant, {}).get(router)
        if entry and entry.under_way:
            entry.under_way -= 1

    def take_back(self, tenant: str, router: str) -> None:
        """One that was let in has never begun."""
        self.end(tenant, router)
        if entry := self._entries.get(tenant, {}).get(router):
            entry.take_back()

    def under_way(self, tenant: str, router: str | None = None) -> int:
        """Return the number of requests at one router; None: at all routers."""
        return sum(entry.under_way for entry in self._of(tenant, router))

    def begun(self, tenant: str, now: float, router: str | None = None) -> int:
        """Return the number of requests that began in the last minute at one router; None: at all."""
        self._forget(tenant, now)
        return sum(entry.many for entry in self._of(tenant, router))

    def seconds_until_below(self, tenant: str, limit: int, now: float, router: str | None = None) -> float:
        """Return the seconds until fewer requests than the limit have begun in a minute, if none begins until then."""
        left = self.begun(tenant, now, router)
        if left < limit:
            return 0.0
        for tick, many in sorted(each for entry in self._of(tenant, router) for each in entry.begun):
            left -= many
            if left < limit:
                return min(max(0.0, tick / _TICKS + WINDOW_SECONDS - now), WINDOW_SECONDS)
        return WINDOW_SECONDS

    def told(self, router: str, tenants: Iterable[str], now: float) -> Told:
        """Return what another router has to know of this one to decide for these tenants."""
        tick = math.floor(now * _TICKS)  # what is younger than it is counts for longer
        made: Told = {}
        for tenant in tenants:
            self._forget(tenant, now)
            for entry in self._of(tenant, router):
                made[tenant] = entry.under_way, [(tick - begun, many) for begun, many in entry.begun]
        return made

    def learn(self, router: str, told: Mapping[str, tuple[int, list[tuple[int, int]]]], now: float) -> None:
        """All that is known of another router, as it says; nothing else of it counts any more."""
        for entries in self._entries.values():
            entries.pop(router, None)
        tick = math.ceil(now * _TICKS)
        for tenant, (under_way, ages) in told.items():
            begun = deque((tick - age, many) for age, many in ages)
            entry = _Entry(under_way, begun, sum(many for _, many in begun))
            self._entries.setdefault(tenant, {})[router] = entry

    def gone(self, router: str) -> None:
        """End the requests of a router that is gone; those of the last minute count on."""
        for entries in self._entries.values():
            if entry := entries.get(router):
                entry.under_way = 0

    def _of(self, tenant: str, router: str | None) -> Iterable[_Entry]:
        entries = self._entries.get(tenant, {})
        if router is None:
            return entries.values()
        return [entries[router]] if router in entries else []

    def _forget(self, tenant: str, now: float) -> None:
        entries = self._entries.get(tenant, {})
        for router, entry in list(entries.items()):
            entry.forget(math.floor((now - WINDOW_SECONDS) * _TICKS))
            if not entry.under_way and not entry.begun:
                del entries[router]
        if not entries:
            self._entries.pop(tenant, None)
