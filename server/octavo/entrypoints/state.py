"""What every route needs: the engine, the options, and whether and how much is being served."""

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

MAX_N = 128  # answers to one prompt, as OpenAI's API; more only where more can run at once
REQUEST_ID = "[A-Za-z0-9._:@/+=~-]{1,128}"


# Whether the present request came before the drain, or over a connection that did: it is not sent away.
taken_on: ContextVar[bool] = ContextVar("taken_on", default=False)


class Phase(enum.Enum):
    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass
class ServerState:
    engine: AsyncLLM
    args: ServerArgs
    metrics: EngineMetrics
    http_metrics: HttpMetrics
    phase: Phase = Phase.LOADING
    created: int = field(default_factory=lambda: int(time.time()))
    num_responding: int = 0  # requests for work whose answers are not all out yet
    ids_in_use: set[str] = field(default_factory=set)  # that clients gave to requests under way

    def __post_init__(self) -> None:
        self.model_names = served_names(self.engine.config, self.args)
        self.fingerprint = system_fingerprint(self.engine.config)
        max_num_seqs = self.engine.config.scheduler.max_num_seqs
        self.max_n = max(MAX_N, max_num_seqs)
        self.max_queued = 8 * max_num_seqs if self.args.max_num_queued_reqs is None else self.args.max_num_queued_reqs
        # Parsing holds up everything else in the process: a long text costs nothing, but millions of values would.
        self.max_body_values = max(200_000, 2 * self.engine.config.scheduler.max_model_len)
        own = max(4 * 2**20, 32 * self.engine.config.scheduler.max_model_len)
        self.max_body_bytes = self.args.max_request_bytes or own
        self.chat_template = _read_template(self.args.chat_template)

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    # Who may come in.

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.model_names:
            raise APIError(
                404,
                f"The model {name[:200]!r} does not exist; this server serves {', '.join(map(repr, self.model_names))}",
                param="model",
                code="model_not_found",
            )

    def claim_id(self, request_id: str) -> None:
        """Take an id that a client has chosen. Raises a 409 while an earlier request goes by it."""
        if request_id in self.ids_in_use and not self.args.allow_duplicate_request_ids:
            raise APIError(
                409,
                f"request_id {request_id!r} is in use by a request that is still under way; choose another, or none "
                "(the server takes it from the body's request_id or the header X-Request-Id; "
                "--allow-duplicate-request-ids lets ids repeat)",
                param="request_id",
                code="duplicate_request_id",
            )
        self.ids_in_use.add(request_id)

    def check_serving(self) -> None:
        """Raises a 503 while no work can be taken on."""
        if self.engine.dead is not None:
            raise APIError(503, f"The engine has ended: {self.engine.dead}", code="engine_dead")
        if self.phase is Phase.LOADING:
            raise APIError(503, "The model is still loading; try again", code="loading", headers={"retry-after": "2"})
        if self.phase is Phase.DRAINING and not taken_on.get():
            raise APIError(
                503, "The server is shutting down; send the request to another replica", code="draining",
                headers={"retry-after": "1", "connection": "close"},
            )  # fmt: skip

    def admit(self, count: int) -> None:
        """Raises a 429 when ``count`` more sequences would make the queue longer than it may be."""
        queued = max(0, self.engine.num_sequences + count - self._room())
        if queued > self.max_queued:
            self.metrics.record_rejection(REJECTED_QUEUE_FULL)
            raise APIError(
                429,
                f"The queue is full: {self.num_queued()} sequences wait, {count} more were to come, and "
                f"{self.max_queued} may wait (--max-num-queued-reqs); try again later or at another replica",
                headers={"retry-after": str(self.engine.seconds_until_room(queued - self.max_queued))},
            )

    def num_queued(self) -> int:
        """Sequences that wait for a place in the engine's batch."""
        return max(0, self.engine.num_sequences - self._room())

    def _room(self) -> int:
        """Sequences that the engine can run at once: those that run while others wait, else as many as it takes."""
        stats = self.engine.last_stats
        if stats is not None and stats.num_waiting_reqs > 0:
            return stats.num_running_reqs
        return self.engine.config.scheduler.max_num_seqs

    # Health.

    def why_not_alive(self) -> str | None:
        """What is wrong with the engine, if anything; None also while the model is loading."""
        if self.engine.dead is not None:
            return str(self.engine.dead)
        if self.phase is Phase.LOADING:
            return None
        silent = self.engine.seconds_since_beat()
        if silent > FROZEN_SECONDS:
            return f"the engine core has shown no sign of life for {silent:.0f} s: it is frozen"
        stalled = self.engine.seconds_stalled()
        if stalled > self.args.health_stall_seconds:
            return f"the engine core has had work for {stalled:.0f} s without finishing a step: it is stalled"
        return None

    def progress(self) -> Progress:
        """The same as numbers, for the metrics; nothing counts as silence or a stall while the model is loading."""
        loading = self.phase is Phase.LOADING
        return Progress(
            alive=self.why_not_alive() is None,
            ready=self.why_not_ready() is None,
            heartbeat_age=0.0 if loading else self.engine.seconds_since_beat(),
            stalled=0.0 if loading else self.engine.seconds_stalled(),
            num_steps=self.engine.client.heartbeat.num_steps,
        )

    def why_not_ready(self) -> str | None:
        return None if self.phase is Phase.SERVING else f"the server is {self.phase.value}"


FROZEN_SECONDS = 5.0


def state_of(request: Request) -> ServerState:
    """The state of the server that handles ``request``."""
    state: ServerState = request.app.state.server
    return state


def served_names(config: EngineConfig, args: ServerArgs) -> list[str]:
    """The names under which the model is served; the first is the one in answers and metrics."""
    return args.served_model_name or [config.model.model]


def system_fingerprint(config: EngineConfig) -> str:
    """What the answers depend on beside the request, as OpenAI's system_fingerprint: this version of the engine, the
    model's files (their names and sizes) and how they are computed. The same on every machine."""
    model, files = config.model, config.model.files
    parts = [
        model.hf_config, [[Path(path).name, os.path.getsize(path)] for path in files.weights], model.dtype,
        model.quantization, config.cache.kv_cache_dtype, config.load_format, model.seed,
    ]  # fmt: skip
    text = json.dumps(parts, sort_keys=True, default=str)
    return f"octavo-{__version__}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _read_template(given: str | None) -> str | None:
    """A chat template as text, from a file when there is one of that name."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat_template {given!r} is neither a template nor a file that can be read: {error}"
        ) from None
