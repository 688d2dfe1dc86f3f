"""Track the limits of a gateway's tenants, and the tokens that they have used. Pure: no clock, no I/O.

Tokens are counted by the engines, all routers' together, and every router reads all of their counters.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass

WINDOW_SECONDS = 60.0
_MAX_SOURCES = 4096  # engines whose counters are remembered
Account = tuple[str, str]  # a tenant, and the account under which engines count its tokens


@dataclass(frozen=True)
class Limits:
    """Limits of one tenant, at all routers together; None: no limit."""

    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    requests_per_minute: int | None = None

    @property
    def counts_requests(self) -> bool:
        """True if routers have to know of each other's requests."""
        return self.max_concurrent is not None or self.requests_per_minute is not None

    def share(self, routers: int) -> Limits:
        """Return the limit of one of so many routers: together they allow no more than the whole, but each allows
        one."""

        def part(most: int | None) -> int | None:
            return None if most is None else max(1, most // routers)

        return Limits(self.tokens_per_minute, part(self.max_concurrent), part(self.requests_per_minute))


@dataclass(frozen=True)
class Refusal:
    """A request that has to wait. `limit`: tokens, requests, or concurrent."""

    limit: str
    text: str
    retry_after: int


def read_limits(text: str) -> tuple[dict[str, Limits], int]:
    """Read the file that the operator writes; also return how many routers there are to be. Raises ValueError."""
    try:
        content = json.loads(text)
        limits = {
            name: Limits(one.get("tokensPerMinute"), one.get("maxConcurrent"), one.get("requestsPerMinute"))
            for name, one in content["tenants"].items()
        }
        return limits, max(1, int(content["routers"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no limits of tenants: {error!r}") from error


class Usage:
    """Tokens of the last minute by account, from counters that only grow while their engine lives."""

    def __init__(self) -> None:
        self._counters: OrderedDict[str, dict[Account, float]] = OrderedDict()  # by engine; the last read at the end
        self._recent: dict[Account, deque[tuple[float, float]]] = {}  # when they were read, and how many
        self._sums: dict[Account, float] = {}

    def update(self, engine: str, counters: Mapping[Account, float], now: float) -> None:
        """Take over the count of an engine so far. Its count when it was first read does not belong to this minute, as
        far as anybody knows. A count lower than before is one that began anew."""
        before = self._counters.get(engine)
        self._counters[engine] = dict(counters)
        self._counters.move_to_end(engine)
        while len(self._counters) > _MAX_SOURCES:
            self._counters.popitem(last=False)
        if before is not None:
            for account, count in counters.items():
                last = before.get(account, 0.0)
                if new := count - last if count >= last else count:
                    self._recent.setdefault(account, deque()).append((now, new))
                    self._sums[account] = self._sums.get(account, 0.0) + new
        self._forget(now)

    def used(self, account: Account, now: float) -> float:
        """Tokens of the last minute."""
        self._forget(now)
        return self._sums.get(account, 0.0)

    def seconds_until_below(self, account: Account, limit: float, now: float) -> float:
        """Return the seconds until less than the limit has been used in a minute, if nothing more is."""
        left = self.used(account, now)
        if left < limit:
            return 0.0
        for when, tokens in self._recent[account]:
            left -= tokens
            if left < limit:
                return when + WINDOW_SECONDS - now
        return WINDOW_SECONDS

    def by_tenant(self, now: float) -> dict[str, float]:
        """The most that an account of each tenant has used in the last minute."""
        self._forget(now)
        most: dict[str, float] = {}
        for (tenant, _), tokens in self._sums.items():
            most[tenant] = max(most.get(tenant, 0.0), tokens)
        return most

    def _forget(self, now: float) -> None:
        for account in list(self._recent):
            recent = self._recent[account]
            while recent and recent[0][0] <= now - WINDOW_SECONDS:
                self._sums[account] -= recent.popleft()[1]
            if not recent:
                del self._recent[account], self._sums[account]
