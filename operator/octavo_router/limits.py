"""What tenants of a gateway may use: requests at the same time, and tokens a minute. Pure: no clock, no I/O.

Each router counts the requests that it has under way itself, exactly, and allows its share of them. Tokens are counted
by the engines, all routers' together, and every router reads all of their counters.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass

WINDOW_SECONDS = 60.0
_MAX_SOURCES = 4096  # engines whose counters are remembered
Account = tuple[str, str]  # a tenant, and the account under which engines count its tokens


@dataclass(frozen=True)
class Limits:
    """Of one tenant; None: no limit. `max_concurrent`: in this router."""

    tokens_per_minute: int | None = None
    max_concurrent: int | None = None


@dataclass(frozen=True)
class Refusal:
    """A request that has to wait. `limit`: tokens, or concurrent."""

    limit: str
    text: str
    retry_after: int


def read_limits(text: str) -> dict[str, Limits]:
    """From the file that the operator writes. Raises ValueError."""
    try:
        content = json.loads(text)
        routers = int(content["routers"])
        return {
            name: Limits(one.get("tokensPerMinute"), _share(one.get("maxConcurrent"), routers))
            for name, one in content["tenants"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no limits of tenants: {error!r}") from error


def _share(most: int | None, routers: int) -> int | None:
    """Of one router: together they allow no more than `most`, but each allows one."""
    return None if most is None else max(1, most // routers)


class Usage:
    """Tokens of the last minute by account, from counters that only grow while their engine lives."""

    def __init__(self) -> None:
        self._counters: OrderedDict[str, dict[Account, float]] = OrderedDict()  # by engine; the last read at the end
        self._recent: dict[Account, deque[tuple[float, float]]] = {}  # when they were read, and how many
        self._sums: dict[Account, float] = {}

    def update(self, engine: str, counters: Mapping[Account, float], now: float) -> None:
        """What an engine has counted so far. What it had counted before it was first read is not of this minute, as far
        as anybody knows. A lower count than before is one that began anew."""
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
        """When less than the limit will have been used in a minute, if nothing more is."""
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


class Tenants:
    """Who may begin a request now."""

    def __init__(self) -> None:
        self.limits: dict[str, Limits] = {}
        self.usage = Usage()
        self.in_flight: Counter[str] = Counter()

    @property
    def limits_tokens(self) -> bool:
        """Whether it matters what the engines count."""
        return any(one.tokens_per_minute for one in self.limits.values())

    def begin(self, account: Account, now: float) -> Refusal | None:
        """A request counts from now on, until `end`; or has to wait."""
        tenant = account[0]
        limits = self.limits.get(tenant, Limits())
        most, tokens = limits.max_concurrent, limits.tokens_per_minute
        if most is not None and self.in_flight[tenant] >= most:
            text = f"this API key has {most} requests under way here, as many as it may: try again when one has ended"
            return Refusal("concurrent", text, 1)
        if tokens is not None and (seconds := self.usage.seconds_until_below(account, tokens, now)) > 0:
            text = f"this API key has used its {tokens} tokens a minute: try again after the seconds of Retry-After"
            return Refusal("tokens", text, max(1, math.ceil(seconds)))
        self.in_flight[tenant] += 1
        return None

    def end(self, account: Account) -> None:
        """A request that was begun has ended."""
        self.in_flight[account[0]] -= 1
        if not self.in_flight[account[0]]:
            del self.in_flight[account[0]]
