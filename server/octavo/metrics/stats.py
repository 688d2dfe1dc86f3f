"""Statistics of steps and finished requests: plain data from the output processor to metrics, log and traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from octavo.interface.engine_config import EngineConfig
from octavo.interface.sampling_params import SamplingParams

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


def cache_config_labels(config: EngineConfig, num_blocks: int, blocks_of_longest: int) -> dict[str, str]:
    """The labels of vllm:cache_config_info: the cache's configuration and its size.

    ``num_blocks`` counts the null block, the label num_gpu_blocks does not. kv_cache_max_concurrency: sequences of
    max_model_len that fit at once, which take ``blocks_of_longest`` each; kv_cache_size_tokens: their tokens.
    """
    usable, size = num_blocks - 1, config.cache.block_size
    slots_of_longest = -(-config.scheduler.max_model_len // size) * size
    values = {
        **asdict(config.cache),
        "num_gpu_blocks": usable,
        "kv_cache_size_tokens": usable * slots_of_longest // blocks_of_longest,
        "kv_cache_max_concurrency": usable / blocks_of_longest,
    }
    return {name: str(value) for name, value in values.items()}


class Tenant(NamedTuple):
    """The sender of a request. Tokens are counted for both together: the name alone may be made up."""

    name: str
    account: str


@dataclass
class FinishedSample:
    """One finished sequence. Times are seconds; None where it ended before that."""

    reason: str  # stop | length | abort | error
    params: SamplingParams
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int
    e2e: float
    queued: float | None = None  # from arrival to its first step
    prefill: float | None = None  # from there to its first token
    decode: float | None = None  # from there to its last token
    inference: float | None = None  # prefill and decode
    num_preemptions: int = 0

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of its prompt that were not cached."""
        return self.num_prompt_tokens - self.num_cached_tokens

    @property
    def max_tokens(self) -> int | None:
        """Its request's limit."""
        return self.params.max_tokens

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds per token after the first; None with fewer than two tokens."""
        if self.decode is None or self.num_generation_tokens < 2:
            return None
        return self.decode / (self.num_generation_tokens - 1)


@dataclass
class FinishedRequest:
    """A request whose ``n`` sequences have all finished. Times as in FinishedSample, over all of them."""

    request_id: str
    arrival_time: float  # seconds since the epoch
    params: SamplingParams
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int  # of all its sequences
    max_num_generation_tokens: int  # of the longest of them
    e2e: float
    queued: float | None = None
    first_token: float | None = None  # from arrival
    prefill: float | None = None
    decode: float | None = None
    inference: float | None = None
    error: str | None = None

    @property
    def n(self) -> int:
        """Number of its sequences."""
        return self.params.n


@dataclass
class IterationStats:
    """One step's tokens and the sequences and requests that finished with it."""

    num_prompt_tokens: int = 0  # of requests whose first token came, cached ones included
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)  # since arrival, one a sequence
    inter_token_seconds: list[float] = field(default_factory=list)  # since the last one, one a further token
    finished: list[FinishedSample] = field(default_factory=list)
    finished_requests: list[FinishedRequest] = field(default_factory=list)
    tenants: dict[Tenant, tuple[int, int]] = field(default_factory=dict)  # tokens of prompts, and generated ones

    @property
    def step_tokens(self) -> list[int]:
        """Tokens of the step, where it has some."""
        count = self.num_prompt_tokens + self.num_generation_tokens
        return [count] if count else []

    def count_for(self, tenant: Tenant | None, prompt: int, generation: int) -> None:
        """Tokens of a tenant's request."""
        if tenant is not None:
            before = self.tenants.get(tenant, (0, 0))
            self.tenants[tenant] = (before[0] + prompt, before[1] + generation)


@dataclass(frozen=True)
class Progress:
    """Health of the engine at one moment. Times are seconds."""

    alive: bool
    ready: bool
    heartbeat_age: float
    stalled: float
    num_steps: int
    ranks: Sequence[tuple[float, int]] = ()  # of several: seconds since the last heartbeat of each, and its steps
