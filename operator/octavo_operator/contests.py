"""Objects that somebody else alters or deletes again and again, such as another controller or an admission webhook.

An alteration is put right at once. One that comes back is put right later and later, and said in a condition: two
controllers that both write at once would keep the API server busy for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo_operator.diagnosis import Problem

Key = tuple[str, str]  # namespace and name of an LLMDeployment
Place = tuple[str, str]  # kind and name of one of its objects

AT_ONCE = 5  # times that the very same is written once more without a pause
_FORGOTTEN_AFTER = 600.0  # seconds without an alteration
_SAID_FOR = 60.0  # seconds, at least, after an alteration was seen


@dataclass
class _Contest:
    what: str  # should be there
    count: int = -1  # how often it was written once more
    due: float = 0.0  # when it may be again
    seen: float = 0.0  # when it was found altered last
    delay: float = 0.0
    came_back: bool = False  # after it was written as often as that is done without a pause
    text: str = ""


class Contests:
    """`clock` counts seconds."""

    def __init__(self, clock: Callable[[], float], first_delay: float = 5.0, longest_delay: float = 300.0) -> None:
        self._clock, self._first, self._longest = clock, first_delay, longest_delay
        self._known: dict[Key, dict[Place, _Contest]] = {}

    def may_write(self, key: Key, place: Place, what: str, why: str, managers: tuple[str, ...] = ()) -> bool:
        """It is not, or no longer, what it should be (`what` identifies that): whether to write it now."""
        now = self._clock()
        places = self._known.setdefault(key, {})
        one = places.get(place)
        if one is None or one.what != what or now - one.seen > max(_FORGOTTEN_AFTER, 2 * one.delay):
            one = places[place] = _Contest(what)
        one.seen, one.came_back = now, one.came_back or one.count >= AT_ONCE
        who = ", ".join(managers) or "another controller or an admission webhook"
        one.text = f"{place[0]} {place[1]}: {why}, by {who}"
        return now >= one.due

    def written(self, key: Key, place: Place) -> None:
        """It was written, and taken by the API server."""
        if one := self._known.get(key, {}).get(place):
            one.count += 1
            if one.count >= AT_ONCE:
                one.delay = min(self._first * 2 ** min(one.count - AT_ONCE, 30), self._longest)
            one.due = self._clock() + one.delay

    def forget(self, key: Key) -> None:
        """The LLMDeployment is gone."""
        self._known.pop(key, None)

    def problem(self, key: Key) -> Problem | None:
        """What is to be said."""
        lasting = self._lasting(key)
        if not lasting:
            return None
        return Problem(
            "Contested",
            f"{lasting[0].text}. It came back each time that it was put right, so that is done less and less often; "
            "stop that writer, or have it leave this object alone",
        )

    def due_after(self, key: Key) -> float | None:
        """In how many seconds there is something to do or to say; None: nothing."""
        now = self._clock()
        dues = [one.due for one in self._known.get(key, {}).values() if one.due > now]
        dues += [self._said_until(one) for one in self._lasting(key)]
        return max(0.0, min(dues) - now) + 0.01 if dues else None

    def _lasting(self, key: Key) -> list[_Contest]:
        now = self._clock()
        return [one for one in self._known.get(key, {}).values() if one.came_back and now < self._said_until(one)]

    def _said_until(self, one: _Contest) -> float:
        return one.seen + max(_SAID_FOR, 2 * one.delay)
