"""A histogram for values that come by the thousand a second: one a token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Histogram(Collector):
    """As prometheus_client's with its labels given, without locks and without a walk over the buckets for each value.

    Values are taken by one thread. ``buckets``: their upper bounds, ascending.
    """

    def __init__(
        self, name: str, text: str, labels: Mapping[str, str], buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self.name, self._text, self._labels = name, text, dict(labels)
        self._bounds = [float(bound) for bound in buckets]
        self._counts = [0] * (len(self._bounds) + 1)  # the last: above all bounds
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        counts, bounds = self._counts, self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            self._sum += value

    def collect(self) -> Iterator[Metric]:
        buckets, below = [], 0
        for bound, count in zip([*self._bounds, float("inf")], self._counts, strict=True):
            below += count
            buckets.append((floatToGoString(bound), below))
        family = HistogramMetricFamily(self.name, self._text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family

    def describe(self) -> list[Metric]:
        """Its name, for the registry."""
        return [HistogramMetricFamily(self.name, self._text)]
