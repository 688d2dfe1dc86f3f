"""Track which routers there are, whether they agree about that, and which one decides for a tenant. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

LEASE_SECONDS = 2.0  # who is silent for longer counts for nothing


class Circle:
    """The routers as one of them sees them. Limits are exact while all agree; then one decides for a tenant, and knows
    of all."""

    def __init__(self, me: str) -> None:
        self.me = me
        self._listed: frozenset[str] | None = None  # None: nobody has said
        self._heard: dict[str, tuple[str, float]] = {}  # by router: whom it sees, and when it last said something
        self._view_of: tuple[frozenset[str], str] = (frozenset(), "")

    def serving(self, routers: Iterable[str]) -> None:
        """Return the routers that serve."""
        self._listed = frozenset(routers)

    def hear(self, router: str, view: str, now: float) -> None:
        """Another one has said whom it sees."""
        self._heard[router] = view, now

    def renew(self, router: str, now: float) -> None:
        """Another one is there."""
        if router in self._heard:
            self._heard[router] = self._heard[router][0], now

    def lose(self, router: str) -> None:
        """Another one has gone."""
        self._heard.pop(router, None)

    def silent(self, now: float) -> list[str]:
        """Return the routers whose lease is over."""
        return [name for name, (_, when) in self._heard.items() if now - when > LEASE_SECONDS]

    @property
    def members(self) -> frozenset[str]:
        """All that may let requests in: a router that starts is heard before it is listed."""
        return frozenset({self.me, *(self._listed or ()), *self._heard})

    @property
    def view(self) -> str:
        """Return a hash of the members: the same at two routers that see the same."""
        members = self.members
        if self._view_of[0] != members:
            self._view_of = members, hashlib.sha256("\0".join(sorted(members)).encode()).hexdigest()[:16]
        return self._view_of[1]

    def agrees(self, now: float) -> bool:
        """True if all see the same, and say so."""
        if self._listed is None:
            return False
        others, view = self.members - {self.me}, self.view
        heard = (self._heard.get(name, ("", 0.0)) for name in others)
        return all(theirs == view and now - when <= LEASE_SECONDS for theirs, when in heard)

    def decider(self, tenant: str) -> str:
        """Choose the router that decides for a tenant, by rendezvous hashing: a router that comes or goes changes the
        decider of its own tenants alone."""
        return max(self.members, key=lambda name: hashlib.sha256(f"{tenant}\0{name}".encode()).digest())
