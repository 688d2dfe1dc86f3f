"""Messages between the front end (HTTP server, offline LLM) and the engine core: plain dataclasses, so that they
travel as msgpack between processes and by reference inside one."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest

from octavo.interface.images import ImageItem
from octavo.interface.lora import Adapter
from octavo.interface.pooling import Pooling
from octavo.interface.sampling_params import SamplingParams
from octavo.interface.thoughts import ThoughtBudget


@dataclass(frozen=True)
class Retain:
    """A wish that a prompt's first ``num_tokens`` stay in the prefix cache for so many ``seconds`` after each use."""

    num_tokens: int
    seconds: float


@dataclass
class EngineCoreRequest:
    """A tokenised, validated request. ``prompt_token_ids`` is never empty."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: list[int]  # the model's own ends of sequence; empty with ignore_eos
    arrival_time: float  # seconds since the epoch
    priority: int = 0  # lower is served first
    cache_salt: str | None = None  # requests share prefix-cache blocks only within one salt
    grammar: str | None = None  # llguidance's form, see octavo.interface.structured_output
    grammar_field: str = "structured_outputs"  # in which the user asked for it: errors name that
    pooling: Pooling | None = None  # return a vector, or classes, instead of tokens
    token_types: list[int] | None = None  # of an encoder's pair of texts; None: all 0
    adapter: Adapter | None = None  # None: the model as it is
    mm_items: list[ImageItem] | None = None  # images of the prompt, in order
    prediction: list[int] | None = None  # tokens that the output may repeat in large part; it stays what it is
    thoughts: ThoughtBudget | None = None  # None: the model may think as long as it likes
    boundaries: list[int] | None = None  # positions after which other prompts may go on differently; None: unknown
    retain: list[Retain] | None = None  # ascending, each for no more seconds than the one before it
    owner: str = ""  # whose these are: of many, none takes all the room that there is


@dataclass
class LogprobsLists:
    """Log-probabilities of consecutive positions, k + 1 columns each, the sampled (or prompt) token first."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    ranks: list[int]  # of the first column's token, from 1

    def since(self, position: int) -> LogprobsLists:
        """The lists without the first ``position`` positions."""
        return LogprobsLists(self.token_ids[position:], self.logprobs[position:], self.ranks[position:])

    def extend(self, more: LogprobsLists) -> None:
        """Add the positions that follow."""
        self.token_ids += more.token_ids
        self.logprobs += more.logprobs
        self.ranks += more.ranks

    def with_known(self, token_ids: list[int]) -> LogprobsLists:
        """The lists with tokens behind them that were not sampled: they are certain."""
        if not token_ids:
            return self
        count = len(token_ids)
        return LogprobsLists(
            [*self.token_ids, *([token_id] for token_id in token_ids)],
            [*self.logprobs, *([0.0] for _ in token_ids)],
            [*self.ranks, *[1] * count],
        )

    def until(self, position: int) -> LogprobsLists:
        """The first ``position`` positions."""
        if len(self.ranks) <= position:
            return self
        return LogprobsLists(self.token_ids[:position], self.logprobs[:position], self.ranks[:position])


@dataclass
class EngineCoreOutput:
    """One step's result for one sequence. ``index`` tells the n samples of a request apart."""

    request_id: str
    index: int
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    prompt_logprobs: LogprobsLists | None = None  # positions 1..P-1, on the first output
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0  # on the first output
    scheduled_time: float | None = None  # on the first output: when first scheduled, seconds since the epoch
    error: str | None = None
    error_param: str | None = None  # the request field that caused the error; None: not the request
    embedding: list[float] | None = None
    num_preemptions: int = 0  # since the last output

    @property
    def is_one_token(self) -> bool:
        """True if it is one more token and nothing else."""
        return (
            len(self.new_token_ids) == 1
            and self.finish_reason is None
            and self.new_logprobs is None
            and self.scheduled_time is None
            and not self.num_cached_tokens
            and not self.num_preemptions
            and self.stop_reason is None
            and self.prompt_logprobs is None
            and self.error is None
            and self.embedding is None
        )


@dataclass
class SpecDecodeStats:
    """Counts of draft tokens, since the last message."""

    num_drafts: int = 0  # sequences' steps with drafts
    num_draft_tokens: int = 0
    num_accepted_per_pos: list[int] = field(default_factory=list)  # by position within the draft; trailing 0s left out

    @property
    def num_accepted_tokens(self) -> int:
        """Accepted tokens of all positions."""
        return sum(self.num_accepted_per_pos)

    def add(self, more: SpecDecodeStats) -> None:
        """Add what was counted since."""
        self.num_drafts += more.num_drafts
        self.num_draft_tokens += more.num_draft_tokens
        both = zip_longest(self.num_accepted_per_pos, more.num_accepted_per_pos, fillvalue=0)
        self.num_accepted_per_pos = [ours + theirs for ours, theirs in both]


@dataclass
class StateStats:
    """States of recurrent layers: gauges, and counts since the last message. Snapshots are counted by the point of a
    conversation at which they were taken."""

    num_running: int = 0  # states of running sequences
    num_snapshots: int = 0  # that the prefix cache offers
    taken: dict[str, int] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    num_evicted: int = 0
    num_tokens_without_state: int = 0  # of prompts: keys and values were cached, but no state behind them


@dataclass
class SchedulerStats:
    """Gauges and counters of the core at one step; counters are deltas since the last message."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0  # 0..1
    retained_blocks: int = 0  # free, and evicted after others
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens
    num_preemptions: int = 0
    num_thoughts_ended: int = 0  # answers whose thoughts have used up their budget
    num_prompt_tokens: int = 0  # computed in the step
    num_generation_tokens: int = 0
    step_time: float = 0.0  # seconds
    recording_obstacle: str | None = None  # what keeps a CPU's steps from being recorded
    spec_decode: SpecDecodeStats | None = None  # None: no speculation
    states: StateStats | None = None  # None: the model has no recurrent layers
    running_adapters: list[str] | None = None  # names of those with running sequences; None: no adapters
    waiting_adapters: list[str] | None = None  # and of those with waiting ones


@dataclass
class EngineCoreOutputs:
    """One step's results."""

    outputs: list[EngineCoreOutput] = field(default_factory=list)
    stats: SchedulerStats | None = None
    timestamp: float = 0.0  # seconds since the epoch, when the step's tokens were known
