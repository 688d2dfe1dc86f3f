"""Decide which of a gateway's tenants may begin a request now. Pure: its clock and its links to other routers are
given.

While all routers agree who they are, one of them decides for a tenant, and a limit is exact. When they do not, or the
one does not answer at once, each router allows its share, so that nothing waits and no limit is passed for long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from octavo_router.circle import Circle
from octavo_router.ledger import Ledger, Told
from octavo_router.limits import Account, Limits, Refusal, Usage

UNDECIDED = "share"  # the answer of one that does not decide: the router that asks has its share
Verdict = Refusal | str | None  # None: it may begin
BEGAN, ENDED, TAKEN_BACK = "began", "ended", "taken back"  # what a router tells the one that decides, of a tenant


class Links(Protocol):
    """The ways to other routers."""

    def ask(self, router: str, tenant: str, then: Callable[[Verdict], None]) -> None:
        """Calls `then` once with its verdict, or with UNDECIDED when it does not answer at once."""

    def tell(self, router: str, what: str, tenant: str) -> None:
        """Tell a router of a tenant's news; one that cannot be reached is told everything once it can."""


class Place:
    """A request that asks to begin, until it has ended. `then` is called once, at once or soon: with None, and it
    counts from then on, or with why it has to wait."""

    def __init__(self, tenants: Tenants, account: Account, then: Callable[[Refusal | None], None]) -> None:
        self._tenants, self.account, self._then = tenants, account, then
        self._has_begun = self._is_over = False

    def decided(self, refusal: Refusal | None) -> bool:
        """True if anybody still waits for it."""
        if self._is_over:
            return False
        self._has_begun = refusal is None
        self._then(refusal)
        return True

    def end(self) -> None:
        """The request has ended, or its client has gone."""
        self._is_over = True
        if self._has_begun:
            self._has_begun = False
            self._tenants.ended(self.account[0])


class Tenants:
    """One router's knowledge of all tenants. `me`: its address for the others; "": it has no links to them."""

    def __init__(self, me: str = "") -> None:
        self.limits: dict[str, Limits] = {}
        self.routers = 1  # that there are to be
        self.usage = Usage()
        self.ledger = Ledger()
        self.circle = Circle(me)
        self.links: Links | None = None
        self._me = me

    @property
    def limits_tokens(self) -> bool:
        """True if it matters what the engines count."""
        return any(one.tokens_per_minute for one in self.limits.values())

    def under_way(self, tenant: str) -> int:
        """Requests in this router."""
        return self.ledger.under_way(tenant, self._me)

    def begin(self, place: Place, now: float) -> None:
        """A request wants to."""
        tenant = place.account[0]
        limits = self.limits.get(tenant, Limits())
        if refusal := self._tokens(place.account, limits, now):
            place.decided(refusal)
        elif not limits.counts_requests:
            self._let_in(place, now)
        elif (decider := self._decider(tenant, now)) == self._me:
            if refusal := self._requests(tenant, limits, now, None):
                place.decided(refusal)
            else:
                self._let_in(place, now)
        elif decider is None or self.links is None:
            self._by_share(place, now)
        else:
            self._ask(decider, place, now)

    def _decider(self, tenant: str, now: float) -> str | None:
        """None: each router has its share."""
        if self.links is None:
            return self._me if self.routers == 1 else None
        decider = self.circle.decider(tenant)
        return decider if decider != self._me or self.circle.agrees(now) else None

    def _ask(self, decider: str, place: Place, now: float) -> None:
        tenant, view = place.account[0], self.circle.view

        def then(verdict: Verdict) -> None:
            if isinstance(verdict, Refusal):
                place.decided(verdict)
            elif verdict == UNDECIDED:
                self._by_share(place, now)
            elif not self._let_in(place, now):
                self._tell(decider, TAKEN_BACK, tenant)
            elif self.circle.view != view:  # others may decide by now, who were told all before this one was let in
                self._tell_of(BEGAN, tenant)

        assert self.links
        self.links.ask(decider, tenant, then)

    def _by_share(self, place: Place, now: float) -> None:
        tenant = place.account[0]
        limits = self.limits.get(tenant, Limits()).share(max(self.routers, len(self.circle.members)))
        if refusal := self._requests(tenant, limits, now, self._me):
            place.decided(refusal)
        elif self._let_in(place, now):
            self._tell_of(BEGAN, tenant)

    def _let_in(self, place: Place, now: float) -> bool:
        tenant = place.account[0]
        self.ledger.begin(tenant, self._me, now)
        if place.decided(None):
            return True
        self.ledger.take_back(tenant, self._me)
        return False

    def ended(self, tenant: str) -> None:
        """A request that was begun here has ended."""
        self.ledger.end(tenant, self._me)
        if self.limits.get(tenant, Limits()).counts_requests:
            self._tell_of(ENDED, tenant)

    def _tell_of(self, what: str, tenant: str) -> None:
        self._tell(self.circle.decider(tenant), what, tenant)

    def _tell(self, router: str, what: str, tenant: str) -> None:
        if self.links and router != self._me:
            self.links.tell(router, what, tenant)

    def decide(self, router: str, tenant: str, now: float) -> Verdict:
        """Decide for another router that asks."""
        limits = self.limits.get(tenant)
        if limits is None or self._decider(tenant, now) != self._me:
            return UNDECIDED
        refusal = self._requests(tenant, limits, now, None)
        if refusal is None:
            self.ledger.begin(tenant, router, now)
        return refusal

    def hear(self, router: str, what: str, tenant: str, now: float) -> None:
        """Take over what another router tells of its requests."""
        if tenant in self.limits:
            if what == BEGAN:
                self.ledger.begin(tenant, router, now)
            elif what == ENDED:
                self.ledger.end(tenant, router)
            elif what == TAKEN_BACK:
                self.ledger.take_back(tenant, router)

    def told(self, router: str, now: float) -> Told:
        """All that another one has to know to decide for its tenants."""
        counted = (name for name, one in self.limits.items() if one.counts_requests)
        return self.ledger.told(self._me, (name for name in counted if self.circle.decider(name) == router), now)

    def _tokens(self, account: Account, limits: Limits, now: float) -> Refusal | None:
        most = limits.tokens_per_minute
        if most is None or not (seconds := self.usage.seconds_until_below(account, most, now)) > 0:
            return None
        text = f"this API key has used its {most} tokens a minute: retry after the number of seconds in Retry-After"
        return Refusal("tokens", text, max(1, math.ceil(seconds)))

    def _requests(self, tenant: str, limits: Limits, now: float, router: str | None) -> Refusal | None:
        """Check the limits of requests, at one router; None: at all. Returns a refusal, or None."""
        here = "" if router is None else " here"
        most, a_minute = limits.max_concurrent, limits.requests_per_minute
        if most is not None and self.ledger.under_way(tenant, router) >= most:
            text = (
                f"this API key has reached its limit of {most} concurrent requests{here}: try again when one has ended"
            )
            return Refusal("concurrent", text, 1)
        if a_minute is None or not (seconds := self.ledger.seconds_until_below(tenant, a_minute, now, router)) > 0:
            return None
        text = f"this API key has reached its limit of {a_minute} requests a minute{here}"
        return Refusal(
            "requests", f"{text}: retry after the number of seconds in Retry-After", max(1, math.ceil(seconds))
        )
