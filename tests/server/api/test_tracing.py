"""A span a request at an OpenTelemetry collector: a small one of the test's own, which reads the real protocol."""

from __future__ import annotations

import gzip
import http.server
import threading
import time

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"


class Collector:
    def __init__(self) -> None:
        self.spans: list = []
        self.resources: list[dict[str, str]] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            self.resources.append({a.key: a.value.string_value for a in resource.resource.attributes})
            for scope in resource.scope_spans:
                self.spans += scope.spans


def attributes(span) -> dict[str, object]:
    values = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        values[attribute.key] = getattr(attribute.value, kind)
    return values


@pytest.mark.slow
def test_every_request_is_a_span(start):
    collector = Collector()
    server = start("--otlp-traces-endpoint", collector.url, "--served-model-name", "traced")
    before = time.time()
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    body = {
        "prompt": "The quick brown fox",
        "max_tokens": 7,
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "ignore_eos": True,
    }
    usage = server.post("/v1/completions", body, headers=headers).json()["usage"]
    with httpx.stream(
        "POST", server.url + "/v1/completions", json={**body, "max_tokens": 900, "stream": True}, timeout=90
    ) as response:
        next(response.iter_lines())
    server.post("/v1/completions", {"prompt": ""})  # refused: no request of the engine, no span
    assert server.stop() == 0, "what is left is sent on the way out"
    after = time.time()
    collector.server.shutdown()

    assert len(collector.spans) == 2
    answered, left = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    assert (answered.trace_id.hex(), answered.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert left.trace_id.hex() != TRACE_ID and not left.parent_span_id
    values = attributes(answered)
    assert values["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert values["gen_ai.usage.completion_tokens"] == 14
    assert values["gen_ai.response.model"] == "traced"
    assert [values[f"gen_ai.request.{name}"] for name in ("max_tokens", "n", "temperature", "top_p")] == [
        7,
        2,
        0.5,
        0.9,
    ]
    latency = {
        name: values[f"gen_ai.latency.{name}"]
        for name in (
            "e2e",
            "time_in_queue",
            "time_to_first_token",
            "time_in_model_prefill",
            "time_in_model_decode",
            "time_in_model_inference",
        )
    }
    assert all(seconds >= 0 for seconds in latency.values())
    assert latency["time_in_queue"] + latency["time_in_model_prefill"] == pytest.approx(latency["time_to_first_token"])
    assert latency["time_in_model_inference"] <= latency["e2e"] < after - before
    assert (answered.end_time_unix_nano - answered.start_time_unix_nano) / 1e9 == pytest.approx(
        latency["e2e"], abs=1e-4
    )
    assert before <= answered.start_time_unix_nano / 1e9 <= after
    assert collector.resources[0]["service.name"] == "octavo"
