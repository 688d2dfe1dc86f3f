"""Metrics of the HTTP server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

from octavo.metrics.histogram import bounds


class HttpMetrics:
    """HTTP metrics with the names of prometheus-fastapi-instrumentator, which dashboards know."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests",
            "Number of requests by route, method and status class",
            ("handler", "method", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Request duration in seconds by route",
            ("handler", "method"),
            buckets=(0.1, 0.5, 1.0),
            registry=registry,
        )
        self._seconds_fine = Histogram(
            "http_request_duration_highr_seconds",
            "Request duration in seconds, all routes, in fine buckets",
            buckets=bounds("0.01 0.025 0.05 0.075 0.1 0.25 0.5 0.75 1 1.5 2 2.5 3 3.5 4 4.5 5 7.5 10 30 60"),
            registry=registry,
        )
        self._request_bytes = Summary(
            "http_request_size_bytes", "Request body size in bytes by route", ("handler",), registry=registry
        )
        self._response_bytes = Summary(
            "http_response_size_bytes", "Response body size in bytes by route", ("handler",), registry=registry
        )

    def record(
        self, handler: str, method: str, status: int, seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """One finished request; ``handler`` is its route's pattern."""
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        self._seconds.labels(handler, method).observe(seconds)
        self._seconds_fine.observe(seconds)
        self._request_bytes.labels(handler).observe(request_bytes)
        self._response_bytes.labels(handler).observe(response_bytes)
