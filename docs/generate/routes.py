"""HTTP routes of the engine and the operator."""

from __future__ import annotations

from typing import Any

from generate import markdown
from generate.source import SERVER, module_defining

_ASIDE = (
    ("GET", "/docs", "Swagger UI of the main or the management port, with assets of our own"),
    ("GET", "/openapi.json", "Schema of all routes, with the limits of the running server"),
    ("GET", "/octavo/blocks", "Show the blocks of the KV cache; on the main port where there is no management port"),
)
_OPERATOR = (
    ("GET", "8080", "/healthz", "200 while its knowledge of the cluster is fresh, else 503 with the reason"),
    ("GET", "8080", "/readyz", "200 once everything has been listed"),
    ("GET", "8080", "/metrics", "Metrics in Prometheus' text format"),
    ("GET", "8080", "/queue-depth/NAMESPACE/NAME", "What KEDA asks: the metric `octavo_queue_depth`"),
    ("GET", "8443", "/apis/external.metrics.k8s.io/v1beta1/...", "The same for HorizontalPodAutoscalers"),
)


def page() -> str:
    module = module_defining("WORK_OPERATIONS", SERVER)
    return markdown.page(
        "HTTP routes",
        "Every GET route answers HEAD, too. Fields of bodies and answers are in `/openapi.json` of a running server.",
        "## Engine: main port only",
        "With `--api-key` they ask for a key. `/` needs none where a browser asks: its page asks the visitor for one.",
        _table(module.WORK_OPERATIONS),
        "## Engine: main port and management port",
        "The management port (`--management-port`, 8001 in pods) asks for no key. On the main port the health routes "
        "marked *no key* are open, the others ask for a key as above.",
        _table(module.STATE_OPERATIONS, _ASIDE),
        "## Operator",
        markdown.table(("method", "port", "path", "meaning"), [(m, port, f"`{p}`", t) for m, port, p, t in _OPERATOR]),
    )


def _table(operations: Any, more: Any = ()) -> str:
    rows = [
        (
            one.method,
            f"`{one.path.replace(':path}', '}')}`",
            one.summary + _forms(one.streams) + (" (no key)" if one.open else ""),
        )
        for one in operations
    ]
    return markdown.table(("method", "path", "meaning"), [*rows, *((m, f"`{p}`", t) for m, p, t in more)])


def _forms(streams: str) -> str:
    """What a response may be beside JSON; "": nothing."""
    if not streams:
        return ""
    return f", as JSON or {'bytes' if streams == 'application/octet-stream' else 'a stream'}"
