"""Collect the metrics of a picker for Prometheus."""

from __future__ import annotations

import time
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from octavo_router.admission import Tenants
from octavo_router.hold import Hold
from octavo_router.pick import Picker

_Kind = TypeVar("_Kind", Counter, Histogram)


class Metrics:
    """Counted here, or, by `collect`, by those who know."""

    def __init__(self, pools: dict[str, Picker], hold: Hold, tenants: Tenants) -> None:
        self.registry = CollectorRegistry()
        self._pools, self._hold, self._tenants = pools, hold, tenants
        self.picks = self._new(
            Counter, "picks", "Requests, by the reason for the choice of their replica.", "pool", "reason"
        )
        self.matched = self._new(
            Histogram,
            "match_ratio",
            "Fraction of a prompt that its replica had processed before.",
            "pool",
            buckets=[0.1 * i for i in range(10)],
        )
        self.seconds = self._new(
            Histogram,
            "pick_seconds",
            "Duration of a pick in seconds, without the network.",
            buckets=[0.0001, 0.0003, 0.001, 0.003, 0.01, 0.1],
        )
        self.errors = self._new(Counter, "pick_errors", "Failed picks. Envoy chose the replica of their requests.")
        self.held_seconds = self._new(
            Histogram,
            "hold_seconds",
            "Seconds that a request waited for a replica.",
            "pool",
            buckets=[1, 2, 5, 10, 30, 100, 300],
        )
        self.refused = self._new(
            Counter,
            "hold_refused",
            "Requests refused because too many waited (full), or no replica came in time.",
            "pool",
            "reason",
        )
        self.tenant_requests = self._new(
            Counter, "tenant_requests", "Requests of tenants that were accepted.", "tenant"
        )
        self.limited = self._new(
            Counter, "tenant_refused", "Requests refused by a limit: tokens, requests, concurrent.", "tenant", "limit"
        )
        self._reads = self._new(
            Counter, "usage_reads", "Reads of the usage of a replica's tenants, by outcome: ok, error.", "outcome"
        )
        self.registry.register(self)

    def _new(self, kind: type[_Kind], name: str, text: str, *labels: str, **options: Any) -> _Kind:
        return kind(f"octavo_router_{name}", text, labels, registry=self.registry, **options)

    def usage_read(self, has_succeeded: bool) -> None:
        """Count a reading of one replica."""
        self._reads.labels("ok" if has_succeeded else "error").inc()

    def collect(self) -> list[Metric]:
        """Return the counts of the pickers themselves."""
        load = GaugeMetricFamily("octavo_router_in_flight", "Requests in progress.", labels=["pool", "replica"])
        known = GaugeMetricFamily(
            "octavo_router_index_blocks", "Prompt blocks in the index of replicas' caches.", labels=["pool"]
        )
        held = GaugeMetricFamily("octavo_router_held_requests", "Requests that wait for a replica.", labels=["pool"])
        waiting = self._hold.held
        for name, picker in list(self._pools.items()):
            known.add_metric([name], picker.known_blocks)
            held.add_metric([name], waiting.get(name, 0))
            for replica, many in picker.in_flight.items():
                load.add_metric([name, replica], many)
        under_way = GaugeMetricFamily("octavo_router_tenant_in_flight", "Requests in progress.", labels=["tenant"])
        used = GaugeMetricFamily(
            "octavo_router_tenant_tokens", "Tokens used in the last minute, of tenants with a limit.", labels=["tenant"]
        )
        tokens = self._tenants.usage.by_tenant(time.monotonic())
        for name, limits in self._tenants.limits.items():
            under_way.add_metric([name], self._tenants.under_way(name))
            if limits.tokens_per_minute is not None:
                used.add_metric([name], tokens.get(name, 0.0))
        return [load, known, held, under_way, used]
