"""Admits requests for a served model, under an id of their own, while the server serves and the queue has room."""

from __future__ import annotations

import math
from contextvars import ContextVar

from octavo.entrypoints.errors import APIError, bad_request
from octavo.entrypoints.lora.served import current_adapter
from octavo.entrypoints.state import Phase, ServerState
from octavo.metrics.prometheus import REJECTED_QUEUE_FULL

MISSING_ADAPTER = "x-octavo-missing-adapter"  # of a 404: another replica may have it by now
_LEAST_MS = 50  # after which a client asks again
_SHOWN = 20  # adapters that an error names
# Whether the current request came before the drain began, or over a connection that did: it is not refused.
before_drain: ContextVar[bool] = ContextVar("before_drain", default=False)
# Whether a router has sent the current request to another replica before, as it says in x-envoy-attempt-count.
was_retried: ContextVar[bool] = ContextVar("was_retried", default=False)


def check_model(state: ServerState, name: str | None, generates: bool = True) -> None:
    """Raises a 404 for a name that is not served; ``x:latest``, Ollama's way to write it, is ``x``. The request is for
    the adapter of that name, if there is one: a 400 where it generates no text."""
    current_adapter.set(None)
    if name is None or name in state.model_names or name.removesuffix(":latest") in state.model_names:
        return
    served = state.adapters[name] or state.adapters[name.removesuffix(":latest")]
    if served is None:
        names = [*state.model_names, *(one.adapter.name for one in state.adapters.all()[:_SHOWN])]
        may_be_elsewhere = state.engine.config.lora is not None and not was_retried.get()
        raise APIError(
            404,
            f"model {name[:200]!r} does not exist; this server serves {', '.join(map(repr, names))}",
            param="model",
            code="model_not_found",
            headers={MISSING_ADAPTER: "true"} if may_be_elsewhere else None,
        )
    if not generates:
        raise bad_request(
            f"model {name!r} is an adapter, and adapters generate text; ask {state.model_name!r}", "model"
        )
    current_adapter.set(served.adapter)


def claim_id(state: ServerState, request_id: str) -> None:
    """Reserve an id that a client has chosen. Raises a 409 while an earlier request has it."""
    if request_id in state.ids_in_use and not state.args.allow_duplicate_request_ids:
        raise APIError(
            409,
            f"request_id {request_id!r} is in use by a request in progress; send another, or none, in the body's "
            "request_id or the header X-Request-Id (--allow-duplicate-request-ids allows duplicates)",
            param="request_id",
            code="duplicate_request_id",
        )
    state.ids_in_use.add(request_id)


def check_serving(state: ServerState) -> None:
    """Raises a 503 while requests are not admitted."""
    if state.engine.dead is not None:
        raise APIError(503, f"The engine has stopped: {state.engine.dead}", code="engine_dead")
    if state.phase is not Phase.LOADING and (frozen := state.why_frozen()) is not None:
        raise APIError(503, f"Not alive: {frozen}", code="not_alive", headers={"retry-after": "1"})
    if state.phase is Phase.LOADING:
        raise APIError(503, "The model is still loading; retry later", code="loading", headers={"retry-after": "2"})
    if state.phase is Phase.DRAINING and not before_drain.get():
        raise APIError(
            503,
            "The server is shutting down; retry at another replica",
            code="draining",
            headers={"retry-after": "1", "connection": "close"},
        )


def check_queue(state: ServerState, count: int) -> None:
    """Raises a 429 if ``count`` more sequences would exceed the queue's limit, with a code of its own where they would
    even if there were no others: to send them again is of no use."""
    most = state.engine.config.scheduler.max_num_seqs + state.max_queued
    if count > most:
        state.metrics.record_rejection(REJECTED_QUEUE_FULL)
        raise APIError(
            429,
            f"{count} sequences requested, and only {most} run and wait at once (--max-num-seqs, "
            "--max-num-queued-reqs); send fewer",
            code="too_many_sequences",
        )
    queued = max(0, state.engine.num_sequences + count - _capacity(state))
    if queued > state.max_queued:
        state.metrics.record_rejection(REJECTED_QUEUE_FULL)
        raise APIError(
            429,
            f"queue full: {num_queued(state)} waiting, {count} requested, limit {state.max_queued} "
            "(--max-num-queued-reqs); retry later or at another replica",
            headers=retry_after(state.engine.seconds_until_room(queued - state.max_queued)),
            overloaded=True,
        )


def retry_after(seconds: float) -> dict[str, str]:
    """The headers that say when to ask again: in whole seconds, and below one in milliseconds, which clients of OpenAI
    and Anthropic read first."""
    headers = {"retry-after": str(max(1, math.ceil(seconds)))}
    if seconds < 1:
        headers["retry-after-ms"] = str(max(_LEAST_MS, math.ceil(seconds * 1000)))
    return headers


def num_queued(state: ServerState) -> int:
    """Sequences that wait to be scheduled."""
    return max(0, state.engine.num_sequences - _capacity(state))


def _capacity(state: ServerState) -> int:
    """Sequences that the engine can run at once: while some wait, those that run, else max_num_seqs."""
    stats = state.engine.last_stats
    if stats is not None and stats.num_waiting_reqs > 0:
        return stats.num_running_reqs
    return state.engine.config.scheduler.max_num_seqs
