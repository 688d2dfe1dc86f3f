"""Backoff of writes that the API server has rejected.

Pods change all the time, and each change causes a reconciliation. Without this, each of them would send a rejected
write again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo_operator.kube.backoff import Backoff
from octavo_operator.kube.store import Key, ObjectRef

REPORT_TRANSIENT_AFTER_SECONDS = 3.0


@dataclass
class _RejectedWrite:
    request: str
    error: Exception
    final: bool
    count: int
    since: float
    retry_at: float


class RejectedWrites:
    """Remembers rejections by object. `clock` counts seconds. Delays grow up to `max_delay`, those of transient errors
    (`final` is false: a webhook that is down, an overloaded API server) up to `max_transient_delay`."""

    def __init__(
        self,
        clock: Callable[[], float],
        base_delay: float = 0.5,
        max_delay: float = 60.0,
        max_transient_delay: float = 30.0,
    ) -> None:
        self._clock = clock
        self._final, self._transient = Backoff(base_delay, max_delay), Backoff(base_delay, max_transient_delay)
        self._known: dict[Key, dict[ObjectRef, _RejectedWrite]] = {}

    def check(self, key: Key, ref: ObjectRef, request: str) -> None:
        """Raises the error again while the same `request` is not to be retried yet."""
        known = self._known.get(key, {}).get(ref)
        if known and known.request == request and self._clock() < known.retry_at:
            raise known.error

    def record(
        self, key: Key, ref: ObjectRef, request: str, error: Exception, final: bool = True, took: float = 0.0
    ) -> None:
        """`request` was rejected after `took` seconds."""
        refs, now = self._known.setdefault(key, {}), self._clock()
        known, since, count = refs.get(ref), now - took, 1
        if known and known.request == request:
            since, count = known.since, known.count + 1
        elif known and not final and not known.final:
            since = known.since  # another request, the same outage
        backoff = self._final if final else self._transient
        refs[ref] = _RejectedWrite(request, error, final, count, since, now + backoff.delay(count))

    def error_to_report(self, key: Key) -> Exception | None:
        """The error for the status: a final one first, otherwise the transient one that has lasted longest."""
        known = list(self._known.get(key, {}).values())
        for one in known:
            if one.final:
                return one.error
        lasting = [one for one in known if self._clock() - one.since >= REPORT_TRANSIENT_AFTER_SECONDS]
        return min(lasting, key=lambda one: one.since).error if lasting else None

    def forget(self, key: Key, ref: ObjectRef | None = None) -> None:
        """The write succeeded, or (without `ref`) the LLMDeployment is gone."""
        if ref is None:
            self._known.pop(key, None)
        elif refs := self._known.get(key):
            refs.pop(ref, None)
            if not refs:
                del self._known[key]

    def retain(self, key: Key, refs: set[ObjectRef]) -> None:
        """Forgets all objects but these, which are still to be written."""
        for ref in self._known.get(key, {}).keys() - refs:
            self.forget(key, ref)

    def retry_after(self, key: Key) -> float | None:
        """Seconds until the next retry; None: nothing is rejected."""
        dues = [one.retry_at for one in self._known.get(key, {}).values()]
        return max(0.0, min(dues) - self._clock()) if dues else None
