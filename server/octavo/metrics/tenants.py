"""Tokens by tenant, for a gateway that limits them, and for whoever pays."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.metrics.stats import Tenant

MAX_TENANTS = 1024  # of those the longest idle is forgotten: its count begins again at 0 when it comes back


class TenantTokens(Collector):
    """A counter with a bounded number of tenants. Requests without a tenant are not counted here."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._tokens: OrderedDict[Tenant, tuple[int, int]] = OrderedDict()  # the longest idle first

    def add(self, tokens: Mapping[Tenant, tuple[int, int]]) -> None:
        """Tokens of prompts, and generated ones."""
        for tenant, (prompt, generation) in tokens.items():
            before = self._tokens.get(tenant, (0, 0))
            self._tokens[tenant] = (before[0] + prompt, before[1] + generation)
            self._tokens.move_to_end(tenant)
        while len(self._tokens) > MAX_TENANTS:
            self._tokens.popitem(last=False)

    def describe(self) -> Iterable[Metric]:
        """Its name, so that it can be asked for alone."""
        return [self._family()]

    def collect(self) -> Iterable[Metric]:
        """Two samples a tenant."""
        family = self._family()
        for tenant, counts in list(self._tokens.items()):
            for kind, count in zip(("prompt", "generation"), counts, strict=True):
                family.add_metric([*self._labels.values(), tenant.name, tenant.account, kind], count)
        return [family]

    def _family(self) -> CounterMetricFamily:
        text = "Number of tokens of the requests of a gateway's tenant, by type: prompt or generation"
        return CounterMetricFamily("octavo:tenant_tokens", text, labels=[*self._labels, "tenant", "account", "type"])
