"""What the API server has refused, and when to ask again.

Pods change all the time, and each change leads to a look at the whole. Without a memory each of these looks would send
what was refused a moment ago once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Key = tuple[str, str]  # namespace and name of an LLMDeployment
Place = tuple[str, str]  # kind and name of one of its objects


@dataclass
class _Refusal:
    what: str
    error: Exception
    count: int
    due: float


class Refusals:
    """`clock` counts seconds. What is refused again is asked for later and later."""

    def __init__(self, clock: Callable[[], float], first_delay: float = 0.5, longest_delay: float = 60.0) -> None:
        self._clock, self._first, self._longest = clock, first_delay, longest_delay
        self._known: dict[Key, dict[Place, _Refusal]] = {}

    def check(self, key: Key, place: Place, what: str) -> None:
        """Raises what was answered lately to the very same. `what`: identifies the request."""
        known = self._known.get(key, {}).get(place)
        if known and known.what == what and self._clock() < known.due:
            raise known.error

    def note(self, key: Key, place: Place, what: str, error: Exception) -> None:
        """It was asked for, and refused."""
        places = self._known.setdefault(key, {})
        known = places.get(place)
        count = known.count + 1 if known and known.what == what else 1
        delay = min(self._first * 2 ** min(count - 1, 30), self._longest)
        places[place] = _Refusal(what, error, count, self._clock() + delay)

    def forget(self, key: Key, place: Place | None = None) -> None:
        """It was done, or (without `place`) the LLMDeployment is gone."""
        if place is None:
            self._known.pop(key, None)
        elif places := self._known.get(key):
            places.pop(place, None)
            if not places:
                del self._known[key]

    def due_after(self, key: Key) -> float | None:
        """In how many seconds to ask again; None: nothing is refused."""
        dues = [one.due for one in self._known.get(key, {}).values()]
        return max(0.0, min(dues) - self._clock()) if dues else None
