"""Collect the metrics of a picker for Prometheus."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from octavo_router.admission import Tenants
from octavo_router.hold import Hold
from octavo_router.pick import Picker


class Metrics:
    """Counted here, or, by `collect`, by those who know."""

    def __init__(self, pools: dict[str, Picker], hold: Hold, tenants: Tenants) -> None:
        self.registry = CollectorRegistry()
        self._pools, self._hold, self._tenants = pools, hold, tenants
        self.picks = Counter(
            "octavo_router_picks",
            "Requests by why their replica was picked.",
            ["pool", "reason"],
            registry=self.registry,
        )
        self.matched = Histogram(
            "octavo_router_match_ratio",
            "Share of a prompt that its replica had seen.",
            ["pool"],
            buckets=[0.1 * i for i in range(10)],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "octavo_router_pick_seconds",
            "Time that a pick took, without the network.",
            buckets=[0.0001, 0.0003, 0.001, 0.003, 0.01, 0.1],
            registry=self.registry,
        )
        self.errors = Counter(
            "octavo_router_pick_errors", "Picks that failed; their requests went on without.", registry=self.registry
        )
        self.held_seconds = Histogram(
            "octavo_router_hold_seconds",
            "Seconds of waiting for a replica.",
            ["pool"],
            buckets=[1, 2, 5, 10, 30, 100, 300],
            registry=self.registry,
        )
        self.refused = Counter(
            "octavo_router_hold_refused",
            "Requests that could not wait (full), or did in vain.",
            ["pool", "reason"],
            registry=self.registry,
        )
        self.tenant_requests = Counter(
            "octavo_router_tenant_requests", "Requests of tenants that may go on.", ["tenant"], registry=self.registry
        )
        self.limited = Counter(
            "octavo_router_tenant_refused",
            "Requests refused by a limit: tokens, requests, concurrent.",
            ["tenant", "limit"],
            registry=self.registry,
        )
        self._reads = Counter(
            "octavo_router_usage_reads",
            "Readings of what a replica's tenants have used: ok, error.",
            ["outcome"],
            registry=self.registry,
        )
        self.registry.register(self)

    def usage_read(self, has_succeeded: bool) -> None:
        """Count a reading of one replica."""
        self._reads.labels("ok" if has_succeeded else "error").inc()

    def collect(self) -> list[Metric]:
        """Return the counts of the pickers themselves."""
        load = GaugeMetricFamily("octavo_router_in_flight", "Requests under way.", labels=["pool", "replica"])
        known = GaugeMetricFamily("octavo_router_index_blocks", "Blocks of prompts that are known.", labels=["pool"])
        held = GaugeMetricFamily("octavo_router_held_requests", "Requests that wait for a replica.", labels=["pool"])
        waiting = self._hold.held
        for name, picker in list(self._pools.items()):
            known.add_metric([name], picker.known_blocks)
            held.add_metric([name], waiting.get(name, 0))
            for replica, many in picker.in_flight.items():
                load.add_metric([name, replica], many)
        under_way = GaugeMetricFamily("octavo_router_tenant_in_flight", "Requests under way.", labels=["tenant"])
        used = GaugeMetricFamily(
            "octavo_router_tenant_tokens", "Tokens of the last minute, where they are limited.", labels=["tenant"]
        )
        tokens = self._tenants.usage.by_tenant(time.monotonic())
        for name, limits in self._tenants.limits.items():
            under_way.add_metric([name], self._tenants.under_way(name))
            if limits.tokens_per_minute is not None:
                used.add_metric([name], tokens.get(name, 0.0))
        return [load, known, held, under_way, used]
