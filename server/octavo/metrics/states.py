"""Metrics of the states of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import Counter, Gauge

from octavo.interface.messages import StateStats


class StateMetrics:
    """States and snapshots of them, in an engine whose model has recurrent layers."""

    def __init__(self, family: Callable[..., Any], labels: dict[str, str]) -> None:
        """``family(kind, name, text, *labels)`` makes a metric of an engine, whose labels are ``labels``."""
        self._labels = labels
        self._slots = family(
            Gauge, "octavo:state_slots", "States in the KV cache: of running sequences, and snapshots", "kind"
        )
        self._taken = family(
            Counter, "octavo:state_snapshots", "Snapshots of states, by where in a conversation", "point"
        )
        self._hits = family(
            Counter, "octavo:state_snapshot_hits", "Requests that began with a snapshot, by where it was taken", "point"
        )
        self._evicted = family(Counter, "octavo:state_snapshots_evicted", "Snapshots that gave way to others")
        self._without = family(
            Counter,
            "octavo:prefix_cache_tokens_without_state",
            "Prompt tokens computed although their keys and values were cached, since no state was",
        )
        for plain in (self._evicted, self._without):
            plain.labels(**labels)

    def record(self, stats: StateStats) -> None:
        """One step's statistics."""
        for kind, number in (("running", stats.num_running), ("snapshot", stats.num_snapshots)):
            self._slots.labels(**self._labels, kind=kind).set(number)
        for counter, counts in ((self._taken, stats.taken), (self._hits, stats.hits)):
            for point, number in counts.items():
                counter.labels(**self._labels, point=point).inc(number)
        self._evicted.labels(**self._labels).inc(stats.num_evicted)
        self._without.labels(**self._labels).inc(stats.num_tokens_without_state)
