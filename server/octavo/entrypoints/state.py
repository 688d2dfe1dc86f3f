"""What every route needs: the engine, the options, admission of requests, and health."""

from __future__ import annotations

import enum
import hashlib
import json
import os
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request

from octavo.engine.async_llm import AsyncLLM
from octavo.entrypoints.args import ServerArgs
from octavo.entrypoints.errors import APIError
from octavo.errors import ConfigError
from octavo.interface.engine_config import EngineConfig
from octavo.metrics.prometheus import REJECTED_QUEUE_FULL, EngineMetrics, HttpMetrics
from octavo.metrics.stats import Progress
from octavo.version import __version__

MAX_N = 128  # as OpenAI's API; more only if max_num_seqs is more
REQUEST_ID = "[A-Za-z0-9._:@/+=~-]{1,128}"


# Whether the current request came before the drain began, or over a connection that did: it is not refused.
before_drain: ContextVar[bool] = ContextVar("before_drain", default=False)


class Phase(enum.Enum):
    """What the server is doing."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass
class ServerState:
    """One server's engine, options, metrics and requests in progress."""

    engine: AsyncLLM
    args: ServerArgs
    metrics: EngineMetrics
    http_metrics: HttpMetrics
    phase: Phase = Phase.LOADING
    created: int = field(default_factory=lambda: int(time.time()))
    num_responding: int = 0  # POST requests whose responses are not complete
    ids_in_use: set[str] = field(default_factory=set)  # chosen by clients, of requests in progress

    def __post_init__(self) -> None:
        self.model_names = served_names(self.engine.config, self.args)
        self.fingerprint = system_fingerprint(self.engine.config)
        max_num_seqs = self.engine.config.scheduler.max_num_seqs
        self.max_n = max(MAX_N, max_num_seqs)
        self.max_queued = 8 * max_num_seqs if self.args.max_num_queued_reqs is None else self.args.max_num_queued_reqs
        # Parsing blocks the event loop: a long text costs little, millions of values would.
        self.max_body_values = max(200_000, 2 * self.engine.config.scheduler.max_model_len)
        own = max(4 * 2**20, 32 * self.engine.config.scheduler.max_model_len)
        self.max_body_bytes = self.args.max_request_bytes or own
        self.chat_template = _read_template(self.args.chat_template)

    @property
    def model_name(self) -> str:
        """The name in responses and metrics."""
        return self.model_names[0]

    # Admission.

    def check_model(self, name: str | None) -> None:
        """Raises a 404 for a name that is not served."""
        if name is not None and name not in self.model_names:
            raise APIError(
                404,
                f"model {name[:200]!r} does not exist; this server serves {', '.join(map(repr, self.model_names))}",
                param="model",
                code="model_not_found",
            )

    def claim_id(self, request_id: str) -> None:
        """Reserve an id that a client has chosen. Raises a 409 while an earlier request has it."""
        if request_id in self.ids_in_use and not self.args.allow_duplicate_request_ids:
            raise APIError(
                409,
                f"request_id {request_id!r} is in use by a request in progress; send another, or none, in the body's "
                "request_id or the header X-Request-Id (--allow-duplicate-request-ids allows duplicates)",
                param="request_id",
                code="duplicate_request_id",
            )
        self.ids_in_use.add(request_id)

    def check_serving(self) -> None:
        """Raises a 503 while requests are not admitted."""
        if self.engine.dead is not None:
            raise APIError(503, f"The engine has stopped: {self.engine.dead}", code="engine_dead")
        if self.phase is Phase.LOADING:
            raise APIError(503, "The model is still loading; retry later", code="loading", headers={"retry-after": "2"})
        if self.phase is Phase.DRAINING and not before_drain.get():
            raise APIError(
                503, "The server is shutting down; retry at another replica", code="draining",
                headers={"retry-after": "1", "connection": "close"},
            )  # fmt: skip

    def admit(self, count: int) -> None:
        """Raises a 429 if ``count`` more sequences would exceed the queue's limit."""
        queued = max(0, self.engine.num_sequences + count - self._capacity())
        if queued > self.max_queued:
            self.metrics.record_rejection(REJECTED_QUEUE_FULL)
            raise APIError(
                429,
                f"queue full: {self.num_queued()} waiting, {count} requested, limit {self.max_queued} "
                "(--max-num-queued-reqs); retry later or at another replica",
                headers={"retry-after": str(self.engine.seconds_until_room(queued - self.max_queued))},
            )

    def num_queued(self) -> int:
        """Sequences that wait to be scheduled."""
        return max(0, self.engine.num_sequences - self._capacity())

    def _capacity(self) -> int:
        """Sequences that the engine can run at once: while some wait, those that run, else max_num_seqs."""
        stats = self.engine.last_stats
        if stats is not None and stats.num_waiting_reqs > 0:
            return stats.num_running_reqs
        return self.engine.config.scheduler.max_num_seqs

    # Health.

    def why_not_alive(self) -> str | None:
        """Why the liveness probe fails; None if it does not, or while the model is loading."""
        if self.engine.dead is not None:
            return str(self.engine.dead)
        if self.phase is Phase.LOADING:
            return None
        silent = self.engine.seconds_since_beat()
        if silent > FROZEN_SECONDS:
            return f"the engine core has been frozen for {silent:.0f} s: no heartbeat"
        stalled = self.engine.seconds_stalled()
        if stalled > self.args.health_stall_seconds:
            return f"the engine core has been stalled for {stalled:.0f} s: it has requests and finishes no step"
        return None

    def progress(self) -> Progress:
        """Health as numbers for the metrics; neither silence nor stalls count while the model is loading."""
        loading = self.phase is Phase.LOADING
        return Progress(
            alive=self.why_not_alive() is None,
            ready=self.why_not_ready() is None,
            heartbeat_age=0.0 if loading else self.engine.seconds_since_beat(),
            stalled=0.0 if loading else self.engine.seconds_stalled(),
            num_steps=self.engine.client.heartbeat.num_steps,
        )

    def why_not_ready(self) -> str | None:
        """Why the readiness probe fails; None if it does not."""
        return None if self.phase is Phase.SERVING else f"the server is {self.phase.value}"


FROZEN_SECONDS = 5.0


def state_of(request: Request) -> ServerState:
    """The state of the server that handles ``request``."""
    state: ServerState = request.app.state.server
    return state


def served_names(config: EngineConfig, args: ServerArgs) -> list[str]:
    """The names of the served model; the first is the one in responses and metrics."""
    return args.served_model_name or [config.model.model]


def system_fingerprint(config: EngineConfig) -> str:
    """OpenAI's system_fingerprint, of what outputs depend on besides the request: the engine's version, the names and
    sizes of the model's files, and how they are computed. The same on every machine."""
    model, files = config.model, config.model.files
    parts = [
        model.hf_config, [[Path(path).name, os.path.getsize(path)] for path in files.weights], model.dtype,
        model.quantization, config.cache.kv_cache_dtype, config.load_format, model.seed,
    ]  # fmt: skip
    text = json.dumps(parts, sort_keys=True, default=str)
    return f"octavo-{__version__}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _read_template(given: str | None) -> str | None:
    """A chat template as text, from a file if it is the name of one."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template {given!r} is neither a template nor a readable file: {error}") from None
