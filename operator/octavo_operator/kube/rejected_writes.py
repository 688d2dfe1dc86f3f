"""What the API server has refused, and when to ask again.

Pods change all the time, and each change leads to a look at the whole. Without a memory each of these looks would send
what was refused a moment ago once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Key = tuple[str, str]  # namespace and name of an LLMDeployment
Place = tuple[str, str]  # kind and name of one of its objects

PATIENCE_SECONDS = 3.0  # what may go away by itself is worth a condition after that


@dataclass
class _Refusal:
    what: str
    error: Exception
    final: bool
    count: int
    since: float
    due: float


class Refusals:
    """`clock` counts seconds. What is refused again is asked for later and later; what may go away by itself (`final`
    is false: a webhook that is down, an API server that is overloaded) at most `longest_passing` seconds later."""

    def __init__(
        self,
        clock: Callable[[], float],
        first_delay: float = 0.5,
        longest_delay: float = 60.0,
        longest_passing: float = 30.0,
    ) -> None:
        self._clock, self._first, self._longest, self._passing = clock, first_delay, longest_delay, longest_passing
        self._known: dict[Key, dict[Place, _Refusal]] = {}

    def check(self, key: Key, place: Place, what: str) -> None:
        """Raises what was answered lately to the very same. `what`: identifies the request."""
        known = self._known.get(key, {}).get(place)
        if known and known.what == what and self._clock() < known.due:
            raise known.error

    def note(self, key: Key, place: Place, what: str, error: Exception, final: bool = True, took: float = 0.0) -> None:
        """It was asked for, and refused after `took` seconds."""
        places, now = self._known.setdefault(key, {}), self._clock()
        known, since, count = places.get(place), now - took, 1
        if known and known.what == what:
            since, count = known.since, known.count + 1
        elif known and not final and not known.final:
            since = known.since  # another request, and the same trouble
        delay = min(self._first * 2 ** min(count - 1, 30), self._longest if final else self._passing)
        places[place] = _Refusal(what, error, final, count, since, now + delay)

    def to_tell(self, key: Key) -> Exception | None:
        """What users are to be told of: what is final first, then what has lasted for a while."""
        known = list(self._known.get(key, {}).values())
        for one in known:
            if one.final:
                return one.error
        lasting = [one for one in known if self._clock() - one.since >= PATIENCE_SECONDS]
        return min(lasting, key=lambda one: one.since).error if lasting else None

    def forget(self, key: Key, place: Place | None = None) -> None:
        """It was done, or (without `place`) the LLMDeployment is gone."""
        if place is None:
            self._known.pop(key, None)
        elif places := self._known.get(key):
            places.pop(place, None)
            if not places:
                del self._known[key]

    def keep(self, key: Key, places: set[Place]) -> None:
        """Only these are still to be done."""
        for place in self._known.get(key, {}).keys() - places:
            self.forget(key, place)

    def due_after(self, key: Key) -> float | None:
        """In how many seconds to ask again; None: nothing is refused."""
        dues = [one.due for one in self._known.get(key, {}).values()]
        return max(0.0, min(dues) - self._clock()) if dues else None
