"""One OpenTelemetry span per request, sent to a collector over OTLP, with vLLM's attribute names.

The span is created when the request has finished, from the times that are taken anyway, so tracing adds no work before.
It continues the trace that the client's ``traceparent`` header names. opentelemetry is imported only when it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from octavo.errors import ConfigError
from octavo.metrics.stats import FinishedRequest, IterationStats
from octavo.version import __version__

_CONTEXT_HEADERS = ("traceparent", "tracestate")
# The headers of the HTTP request that is being handled, where there is one.
incoming_headers: ContextVar[Mapping[str, str]] = ContextVar("incoming_headers", default={})  # noqa: B039


class Tracer:
    """Sends spans to ``endpoint``, a collector's URL such as http://localhost:4318/v1/traces.

    Raises ConfigError when opentelemetry is not installed.
    """

    def __init__(self, endpoint: str, model_name: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"otlp_traces_endpoint needs {error.name}: pip install opentelemetry-sdk "
                "opentelemetry-exporter-otlp-proto-http, or leave the option out"
            ) from None
        name = os.environ.get("OTEL_SERVICE_NAME", "octavo")
        resource = Resource.create({"service.name": name, "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("octavo", __version__)
        self._server_kind = trace.SpanKind.SERVER
        self._failed = trace.Status(trace.StatusCode.ERROR)
        self._extract = TraceContextTextMapPropagator().extract
        self._model_name = model_name
        self._contexts: dict[str, Any] = {}

    def begin(self, request_id: str) -> None:
        """Remember which trace a request belongs to: that of the HTTP request at hand."""
        headers = incoming_headers.get()
        carrier = {name: headers[name] for name in _CONTEXT_HEADERS if name in headers}
        self._contexts[request_id] = self._extract(carrier) if carrier else None

    def record(self, stats: IterationStats) -> None:
        """Send the spans of the requests that finished with a step."""
        for request in stats.finished_requests:
            if request.request_id in self._contexts:
                self._send(request, self._contexts.pop(request.request_id))

    def _send(self, request: FinishedRequest, context: Any) -> None:
        span = self._tracer.start_span(
            "llm_request",
            context=context,
            kind=self._server_kind,
            start_time=_nanoseconds(request.arrival_time),
            attributes={name: value for name, value in self._attributes(request).items() if value is not None},
        )
        if request.error is not None:
            span.set_status(self._failed)
            span.set_attribute("error.message", request.error)
        span.end(_nanoseconds(request.arrival_time + request.e2e))

    def _attributes(self, request: FinishedRequest) -> dict[str, Any]:
        params = request.params
        return {
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.n": params.n,
            "gen_ai.response.model": self._model_name,
            "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": request.num_generation_tokens,
            "gen_ai.usage.cached_tokens": request.num_cached_tokens,
            "gen_ai.latency.time_in_queue": request.queued,
            "gen_ai.latency.time_to_first_token": request.first_token,
            "gen_ai.latency.e2e": request.e2e,
            "gen_ai.latency.time_in_model_prefill": request.prefill,
            "gen_ai.latency.time_in_model_decode": request.decode,
            "gen_ai.latency.time_in_model_inference": request.inference,
        }

    def close(self) -> None:
        """Send what is left; waits for the collector a few seconds at most."""
        self._provider.force_flush(3_000)
        self._provider.shutdown()


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
