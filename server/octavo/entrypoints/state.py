"""The state that every route needs: the engine, the options, and health."""

from __future__ import annotations

import enum
import hashlib
import json
import os
import time
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

from starlette.requests import Request

from octavo.chat.decisions.calibration import read_temperatures
from octavo.chat.options import ChatOptions
from octavo.chat.own_format import with_response_template
from octavo.chat.replay import Replay, SpokenAnswers
from octavo.engine.async_llm import AsyncLLM
from octavo.entrypoints.args import ServerArgs
from octavo.entrypoints.bodies import Bodies
from octavo.entrypoints.images import ImageReader
from octavo.entrypoints.lora.listed import AdapterList
from octavo.entrypoints.lora.served import Adapters
from octavo.entrypoints.replica import tag_of
from octavo.entrypoints.sealing import Seal, secret_of
from octavo.entrypoints.storage.places import open_store
from octavo.entrypoints.tenants import current_tenant
from octavo.errors import ConfigError
from octavo.fetch.decisions_file import read_decisions_file
from octavo.interface.engine_config import EngineConfig
from octavo.metrics.http_metrics import HttpMetrics
from octavo.metrics.prometheus import EngineMetrics
from octavo.metrics.stats import Progress
from octavo.system.limits import memory_limit
from octavo.text.text_lengths import TextLengths
from octavo.version import __version__

MAX_N = 128  # as OpenAI's API; more only if max_num_seqs is more
REQUEST_ID = "[A-Za-z0-9._:@/+=~-]{1,128}"


class Phase(enum.Enum):
    """The server's phase of life."""

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
    tool_format: str | None = None  # of the model's calls: see `octavo.chat.report.tool_format`
    num_responding: int = 0  # POST requests whose responses are not complete
    ids_in_use: set[str] = field(default_factory=set)  # chosen by clients, of requests in progress

    # What the engine calls the requests in progress, by the id of X-Request-Id, which ends the answer's own id
    engine_ids: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model_names = served_names(self.engine.config, self.args)
        self.adapters = Adapters(self.engine, self.args.lora_dir, self.model_names)
        self.adapter_list = AdapterList(self.adapters, self.args.lora_list, self.args.lora_credentials)
        self.replica_tag = tag_of(self.args.replica_address, self.args.port)
        self.fingerprint = system_fingerprint(self.engine.config)
        self.seal = Seal(self.args.seal_key.encode() if self.args.seal_key else secret_of(self.engine.config))
        self.temperatures = read_decisions_file(
            self.args.decisions_calibration, self.engine.config.model.files, read_temperatures
        )
        self.store = open_store(self.args)
        self.text_lengths, self._spoken = TextLengths(), SpokenAnswers()
        max_num_seqs = self.engine.config.scheduler.max_num_seqs
        self.max_n = max(MAX_N, max_num_seqs)
        self.max_queued = 8 * max_num_seqs if self.args.max_num_queued_reqs is None else self.args.max_num_queued_reqs
        # Parsing blocks the event loop: a long text costs little, millions of values would.
        self.max_body_values = max(200_000, 2 * self.engine.config.scheduler.max_model_len)
        least = 32 if self.engine.config.model.reads_images else 4  # MiB
        own = max(least * 2**20, 32 * self.engine.config.scheduler.max_model_len)
        self.max_body_bytes = self.args.max_request_bytes or own
        # Of bodies that arrive at once; each takes its size two or three times until its images have been read.
        self.bodies = Bodies(max(4 * self.max_body_bytes, min(1 << 30, memory_limit() // 8)))
        self.images = ImageReader(self.engine, self.args, self.bodies)
        shared = {
            option.name: getattr(self.args, option.name)
            for option in fields(ChatOptions)
            if hasattr(self.args, option.name)
        }
        options = ChatOptions(**shared | {"chat_template": _read_template(self.args.chat_template)})
        self.chat_options = with_response_template(options, self.engine.tokenizer)

    @property
    def model_name(self) -> str:
        """The name in responses and metrics."""
        return self.model_names[0]

    def replay(self, salt: str | None) -> Replay | None:
        """The answers that were spoken to the request's tenant under a cache's salt; None where none are remembered."""
        tokenizer, tenant = self.engine.tokenizer, current_tenant.get()
        if tokenizer is None or not (self.args.replay and self.engine.config.cache.enable_prefix_caching):
            return None
        decode = partial(tokenizer.decode, skip_special_tokens=False)
        return Replay(self._spoken, f"{salt} {tenant}", tokenizer.special_text, decode)

    @property
    def store_tag(self) -> str:
        """The name of this replica in ids of what its store has; empty where all replicas have it."""
        return "" if self.store.is_shared else self.replica_tag

    @property
    def has_ended(self) -> bool:
        """The engine core has ended."""
        return self.engine.dead is not None

    def why_not_alive(self) -> str | None:
        """Say why the liveness probe fails; None if it does not, or while the model is loading."""
        if self.engine.dead is not None:
            return str(self.engine.dead)
        if self.phase is Phase.LOADING:
            return None
        if ranks := self.engine.silent_ranks(FROZEN_SECONDS):
            names = ", ".join(f"rank {rank}" for rank in ranks)
            return f"{names} of the engine: no heartbeat for more than {FROZEN_SECONDS:g} s"
        if (frozen := self.why_frozen()) is not None:
            return frozen
        stalled = self.engine.seconds_stalled()
        if stalled > self.args.health_stall_seconds:
            return f"the engine core has been stalled for {stalled:.0f} s: it has requests and finishes no step"
        return None

    def why_frozen(self) -> str | None:
        """Says for how long the engine core has sent no heartbeat; None if it has lately."""
        silent = self.engine.seconds_since_beat()
        return f"the engine core has been frozen for {silent:.0f} s: no heartbeat" if silent > FROZEN_SECONDS else None

    def progress(self) -> Progress:
        """Health as numbers for the metrics; neither silence nor stalls count while the model is loading."""
        loading, beats = self.phase is Phase.LOADING, self.engine.client.process.heartbeats
        return Progress(
            alive=self.why_not_alive() is None,
            ready=self.why_not_ready() is None,
            heartbeat_age=0.0 if loading else self.engine.seconds_since_beat(),
            stalled=0.0 if loading else self.engine.seconds_stalled(),
            num_steps=self.engine.client.heartbeat.num_steps,
            ranks=[(0.0 if loading else beat.seconds_since_beat(), beat.num_steps) for beat in beats if len(beats) > 1],
        )

    def why_not_ready(self) -> str | None:
        """Say why the readiness probe fails; None if it does not."""
        return None if self.phase is Phase.SERVING else f"the server is {self.phase.value}"


FROZEN_SECONDS = 5.0  # without a heartbeat, after which no request is admitted
FAILED_SECONDS = 2 * FROZEN_SECONDS  # after which the requests under way end: a core may come back until then


def state_of(request: Request) -> ServerState:
    """The state of the server that handles ``request``."""
    state: ServerState = request.app.state.server
    return state


def served_names(config: EngineConfig, args: ServerArgs) -> list[str]:
    """The names of the served model; the first is the one in responses and metrics."""
    return args.served_model_name or [config.model.model]


def system_fingerprint(config: EngineConfig) -> str:
    """OpenAI's system_fingerprint, of what outputs depend on besides the request: the engine's version, the names and
    sizes of the model's files, and how they are computed; the same wherever that is."""
    model, files = config.model, config.model.files
    parts = [
        model.hf_config,
        [[Path(path).name, os.path.getsize(path)] for path in files.weights],
        model.dtype,
        model.quantization,
        config.cache.kv_cache_dtype,
        config.load_format,
        model.seed,
    ]
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
