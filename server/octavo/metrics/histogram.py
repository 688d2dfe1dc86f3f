"""A Prometheus histogram that is cheap enough to observe every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


def bounds(numbers: str) -> tuple[float, ...]:
    """Buckets' upper bounds, which stand in ``numbers`` with spaces between them."""
    return tuple(map(float, numbers.split()))


class Histogram(Collector):
    """prometheus_client's histogram for one set of labels, without locks and with a binary search for the bucket.

    Only one thread may observe. ``buckets``: their upper bounds, ascending.
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
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Count several values."""
        counts, bounds = self._counts, self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            self._sum += value

    def collect(self) -> Iterator[Metric]:
        """The metric as a scrape reads it."""
        buckets, below = [], 0
        for bound, count in zip([*self._bounds, float("inf")], self._counts, strict=True):
            below += count
            buckets.append((floatToGoString(bound), below))  # type: ignore[no-untyped-call]
        family = HistogramMetricFamily(self.name, self._text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family

    def describe(self) -> list[Metric]:
        """The metric's name, for the registry."""
        return [HistogramMetricFamily(self.name, self._text)]
