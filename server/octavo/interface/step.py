"""One step: what the scheduler asks of the model runner, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.interface.images import ImageItem
from octavo.interface.lora import Adapter
from octavo.interface.messages import LogprobsLists
from octavo.interface.pooling import Pooling
from octavo.interface.sampling_params import SamplingParams


@dataclass
class NewRequestData:
    """A sequence that the runner has no row for: new, or back after a preemption."""

    req_id: str
    token_ids: list[int]  # prompt and what was already generated
    num_prompt_tokens: int
    sampling_params: SamplingParams
    stop_token_ids: frozenset[int]  # EOS and stop_token_ids: what min_tokens holds back
    sample_index: int  # 0..n-1, part of the random stream's identity
    block_ids: list[list[int]]  # of each group of layers, all of one length
    num_computed_tokens: int
    num_kv_tokens: int  # KV of positions below is already in the blocks and must not be written again
    grammar: str | None = None
    pooling: Pooling | None = None
    token_types: list[int] | None = None  # of an encoder's pair of texts; None: all 0
    adapter_slot: int = -1  # of its LoRA adapter; -1: it has none
    state_pages: list[int] | None = None  # blocks that hold the state of its recurrent layers; None: it has none
    num_state_tokens: int = 0  # that this state has seen: as many as are computed
    mm_items: list[ImageItem] | None = None  # where its images lie; what is encoded comes in `encoder_inputs`


@dataclass
class CachedRequestData:
    """A sequence that the runner knows, perhaps only since this step, with what changed; those without changes are not
    listed."""

    req_id: str
    new_block_ids: list[list[int]]  # appended to the block table of each group of layers, as many; or nothing
    replaced_blocks: list[tuple[int, int, int]]  # (group, index in its block table, new block id): copy-on-write
    state_pages: list[int] | None = None  # where its state goes from this step on; it is read where it was
    # Where the step writes it too, as it is before a position: that, which is the second of those computed or a later
    # one, but not the last one committed, and blocks
    snapshot: tuple[int, list[int]] | None = None


@dataclass
class SchedulerOutput:
    """One step. Sequences are computed in the order of ``num_scheduled_tokens``; each is given that many tokens,
    starting at its number of computed tokens. One whose last known (or placeholder) token is among them is sampled.

    Drafts follow a sequence's last known token, and each of these tokens is sampled after. Samples are taken as long as
    the draft before them is what was sampled there. The next step starts after these: what was computed of the other
    drafts is computed anew.
    """

    step_id: int
    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: list[CachedRequestData] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    sampled_req_ids: list[str] = field(default_factory=list)  # those whose step ends with a new token, in order
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)  # drafts, counted above too
    # Tokens that a drafter in the worker guesses after the step; 0: for a prompt, which it only reads for now
    num_draft_tokens: dict[str, int] = field(default_factory=dict)
    # With several stages: the last known token, sampled by the last one, and its position; the others know neither
    last_tokens: dict[str, tuple[int, int]] = field(default_factory=dict)
    block_copies: list[tuple[int, int]] = field(default_factory=list)  # (src, dst), before anything is written
    adapters: dict[int, Adapter] = field(default_factory=dict)  # to be brought into slots before anything is computed
    finished_req_ids: list[str] = field(default_factory=list)  # rows to drop before anything else, preempted ones too
    rows_of_replicas: list[int] = field(default_factory=list)  # tokens of each engine that shares experts
    free_encoder_hashes: list[str] = field(default_factory=list)  # digests of images whose embeddings go, first of all
    encoder_inputs: list[ImageItem] = field(default_factory=list)  # images to be encoded before anything is computed
    total_num_scheduled_tokens: int = 0
    num_prompt_tokens: int = 0  # of the total: those of prompts (recomputed ones included)


@dataclass
class ModelRunnerOutput:
    """The results of one step, by sequence."""

    # One token each and one more for each accepted draft; none when pooling
    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, LogprobsLists] = field(default_factory=dict)
    prompt_logprobs: dict[str, LogprobsLists] = field(default_factory=dict)  # the step's share
    errors: dict[str, str] = field(default_factory=dict)  # sequences that this step ended, and why
    grammar_errors: dict[str, str] = field(default_factory=dict)  # the same where the request's grammar is to blame
    embeddings: dict[str, list[float]] = field(default_factory=dict)  # or classes, as `Pooling` asks
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)  # what may follow the sampled tokens
    draft_seconds: float = 0.0  # that guessing them has taken


# A step that has been handed to a device: calling it waits for the results. Call each one once, in order.
PendingOutput = Callable[[], ModelRunnerOutput]
