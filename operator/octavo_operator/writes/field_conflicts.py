"""Objects that another controller or an admission webhook changes or deletes over and over.

A change by others is reverted at once. One that comes back is reverted with backoff and reported in a condition: two
controllers that both write at once would keep the API server busy for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo_operator.kube.backoff import Backoff
from octavo_operator.kube.store import Key, ObjectRef
from octavo_operator.observed.diagnosis import Problem

IMMEDIATE_REVERTS = 5  # of the same object, before backoff begins
_FORGET_AFTER_SECONDS = 600.0  # without a change by others
_REPORT_SECONDS = 60.0  # at least, after a change by others


@dataclass
class _FieldConflict:
    desired: str
    reverts: int = -1
    next_write: float = 0.0
    seen: float = 0.0  # when it was found changed last
    delay: float = 0.0
    persists: bool = False  # after IMMEDIATE_REVERTS
    text: str = ""


class FieldConflicts:
    """Counts reverts by object. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float], base_delay: float = 5.0, max_delay: float = 300.0) -> None:
        self._clock, self._backoff = clock, Backoff(base_delay, max_delay)
        self._known: dict[Key, dict[ObjectRef, _FieldConflict]] = {}

    def may_write(self, key: Key, ref: ObjectRef, desired: str, why: str, managers: tuple[str, ...] = ()) -> bool:
        """True if to write an object that differs from what is desired (`desired`: a hash of that) now."""
        now = self._clock()
        refs = self._known.setdefault(key, {})
        one = refs.get(ref)
        if one is None or one.desired != desired or now - one.seen > max(_FORGET_AFTER_SECONDS, 2 * one.delay):
            one = refs[ref] = _FieldConflict(desired)
        one.seen, one.persists = now, one.persists or one.reverts >= IMMEDIATE_REVERTS
        who = ", ".join(managers) or "another controller or an admission webhook"
        one.text = f"{ref[0]} {ref[1]}: {why}, by {who}"
        return now >= one.next_write

    def record_write(self, key: Key, ref: ObjectRef) -> None:
        """The API server has accepted a write of the object."""
        if one := self._known.get(key, {}).get(ref):
            one.reverts += 1
            if one.reverts >= IMMEDIATE_REVERTS:
                one.delay = self._backoff.delay(one.reverts - IMMEDIATE_REVERTS + 1)
            one.next_write = self._clock() + one.delay

    def forget(self, key: Key) -> None:
        """The LLMDeployment is gone."""
        self._known.pop(key, None)

    def problem(self, key: Key) -> Problem | None:
        """The cause to report in the status, or None."""
        lasting = self._lasting(key)
        if not lasting:
            return None
        return Problem(
            "FieldConflict",
            f"{lasting[0].text}. The change came back after each revert, so the operator reverts it less often now; "
            "stop that writer, or have it leave this object alone",
        )

    def requeue_after(self, key: Key) -> float | None:
        """Seconds until the next write, or until the report ends; None: neither."""
        now = self._clock()
        dues = [one.next_write for one in self._known.get(key, {}).values() if one.next_write > now]
        dues += [self._reported_until(one) for one in self._lasting(key)]
        return max(0.0, min(dues) - now) + 0.01 if dues else None

    def _lasting(self, key: Key) -> list[_FieldConflict]:
        now = self._clock()
        return [one for one in self._known.get(key, {}).values() if one.persists and now < self._reported_until(one)]

    def _reported_until(self, one: _FieldConflict) -> float:
        return one.seen + max(_REPORT_SECONDS, 2 * one.delay)
