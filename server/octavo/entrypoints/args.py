"""Options of the HTTP server; those of the engine are octavo.engine.args.EngineArgs."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.entrypoints.replica import tag_of
from octavo.errors import ConfigError
from octavo.text.chat_template import check_variables

_MAX_TTL = 100 * 365 * 24 * 3600
_MIN_STORE_BYTES = 1 << 20
BOTH = "both"
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+=~-]{0,255}")


@dataclass
class ServerArgs:
    """vLLM's names and meanings where vLLM has the option too."""

    host: str = "0.0.0.0"
    port: int = 8000
    uds: str | None = None
    replica_address: str | None = None  # at which routers in front of several servers know this one
    served_model_name: list[str] = field(default_factory=list)  # the first is the one in responses
    api_key: list[str] = field(default_factory=list)
    seal_key: str | None = None  # of thoughts that clients keep; None: made of the model
    management_host: str | None = None  # None: as host
    management_port: int | None = None  # None: no second port
    max_num_queued_reqs: int | None = None  # None: 8 * max_num_seqs
    max_request_bytes: int | None = None  # None: 4 MiB, or 32 bytes for each token of max_model_len if that is more
    responses_store: str | None = None  # a file, postgresql://..., or "memory"; None: a file in the user's state folder
    responses_ttl: int = 30 * 24 * 3600  # seconds; 0: forever
    responses_max_bytes: int | None = None  # None: 1 GiB in a file, 64 MiB in memory
    responses_max_bytes_per_tenant: int | None = None  # None: no limit
    max_logprobs: int = 20
    allow_duplicate_request_ids: bool = False
    shutdown_timeout: float = 30.0  # seconds for requests in progress after SIGTERM
    health_stall_seconds: float = 30.0
    watchdog_seconds: float = 300.0
    headless: bool = False
    chat_template: str | None = None  # a file or the template itself
    trust_request_chat_template: bool = False
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    exclude_tools_when_tool_choice_none: bool = False
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    enable_force_include_usage: bool = False
    return_tokens_as_token_ids: bool = False
    response_role: str = "assistant"
    tool_call_parser: str | None = None  # None: the format that the chat template shows
    enable_auto_tool_choice: bool = True
    tool_strict_level: str = "auto"  # see `octavo.chat.options.STRICT_LEVELS`
    strict_json_schema: bool = True  # a schema's objects have no other properties, unless it allows them
    reasoning_parser: str | None = None  # None: the tags that the chat template shows
    preserve_reasoning: str = "auto"  # see `octavo.chat.options.PRESERVE`
    stream_head_after: float | None = None  # seconds; None: a stream's head comes with its first event
    clamp_max_tokens: bool = False  # more than fits beside the prompt is lowered, not refused
    reasoning_field: str = BOTH  # or one of `octavo.text.messages.REASONING`: the name of thoughts in chat completions
    replay: bool = True  # answers stand in the prompts of later turns as they were spoken
    reasoning_budget_message: str = ""  # that ends thoughts which have used up a request's budget
    deferred_tools: str = "found"  # or "top": where the model is told of tools that a client defers
    decisions_min_mass: float = 0.01  # of a question's labels; a refusal below it
    decisions_calibration: str | None = None  # None: decisions.json of the model's folder
    embedding_pooling: str | None = None  # None: as the model's files say, "mean" where they say nothing
    lora_modules: list[str] = field(default_factory=list)  # name=path, or a JSON object
    lora_dir: str | None = None  # below it lies what requests may load
    lora_list: str | None = None  # a file that lists adapters to fetch, serve and follow
    lora_credentials: str | None = None  # a folder with what fetching them needs
    allow_runtime_lora_updating: bool = False
    allowed_media_domains: list[str] = field(default_factory=list)  # hosts whose images are fetched
    allowed_local_media_path: str | None = None  # below it lie images that file: addresses may name
    root_path: str = ""
    disable_fastapi_docs: bool = False
    allowed_origins: list[str] = field(default_factory=lambda: ["*"])
    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    allow_credentials: bool = False
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    log_level: str = "info"
    log_format: str = "text"
    disable_access_log: bool = False
    enable_log_requests: bool = False
    disable_log_stats: bool = False
    otlp_traces_endpoint: str | None = None  # for example http://localhost:4318/v1/traces

    def __post_init__(self) -> None:
        # Secrets that were made of files end in a newline, which no header can carry.
        self.api_key = [key.strip() for key in self.api_key]
        self.seal_key = self.seal_key and self.seal_key.strip()

    def check(self) -> None:
        """Raises ConfigError."""
        for name in ("port", "management_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 65535:
                raise ConfigError(f"{name} must be between 0 and 65535, got {value}")
        for name in (
            "stream_head_after",
            "max_num_queued_reqs",
            "shutdown_timeout",
            "watchdog_seconds",
            "max_logprobs",
        ):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} must not be negative, got {value}")
        for name in ("max_request_bytes", "health_stall_seconds"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.decisions_min_mass <= 1:
            raise ConfigError(f"decisions_min_mass must be between 0 and 1, got {self.decisions_min_mass}")
        tag_of(self.replica_address, self.port)
        self._check_store()
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("ssl_keyfile and ssl_certfile must be given together")
        try:
            check_variables(self.default_chat_template_kwargs, "default_chat_template_kwargs")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        for module in self.lora_modules:
            parse_module(module)
        if self.allowed_local_media_path is not None and not Path(self.allowed_local_media_path).is_dir():
            raise ConfigError(f"allowed_local_media_path must be a folder, got {self.allowed_local_media_path!r}")
        self._check_secrets()

    def _check_store(self) -> None:
        scheme, is_address, _ = (self.responses_store or "").partition("://")
        if is_address and scheme not in ("postgresql", "postgres"):
            raise ConfigError(f'responses_store must be a file, postgresql://... or "memory", got {scheme[:40]}://...')
        if is_address and self.responses_max_bytes is not None:
            raise ConfigError("responses_max_bytes is for files and memory; drop it, and limit the database itself")
        if self.responses_store == "":
            raise ConfigError('responses_store must not be empty; name a file, or "memory"')
        if not 0 <= self.responses_ttl <= _MAX_TTL:
            raise ConfigError(f"responses_ttl must be between 0 and {_MAX_TTL} seconds, got {self.responses_ttl}")
        for name in ("responses_max_bytes", "responses_max_bytes_per_tenant"):
            value = getattr(self, name)
            if value is not None and value < _MIN_STORE_BYTES:
                raise ConfigError(f"{name} must be at least {_MIN_STORE_BYTES} (1MiB), got {value}")

    def _check_secrets(self) -> None:
        if any(not key for key in self.api_key):
            raise ConfigError("api_key must not be empty; omit it to serve without a key")
        if self.seal_key is not None and not self.seal_key:
            raise ConfigError("seal_key must not be empty; omit it for a key that is made of the model")


def parse_module(text: str) -> tuple[str, str, str | None]:
    """Name, path and base model of one value of --lora-modules: ``name=path``, or a JSON object with these. Raises
    ConfigError."""
    base = None
    if text.startswith("{"):
        try:
            given = json.loads(text)
            name, path, base = given["name"], given["path"], given.get("base_model_name")
        except (ValueError, KeyError, TypeError, AttributeError):
            name = path = None
    else:
        name, _, path = text.partition("=")
    if not isinstance(name, str) or not isinstance(path, str) or not path or not ADAPTER_NAME.fullmatch(name):
        raise ConfigError(
            f'lora_modules must be name=path or {{"name": ..., "path": ...}}, got {text[:200]!r}; a name has letters, '
            "digits and ._:@/+=~-"
        )
    return name, path, base if isinstance(base, str) else None
