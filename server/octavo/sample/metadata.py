"""Inputs of one sampling step, gathered by `SamplingStates.make_metadata`. A feature that no row uses is None and
costs nothing. ``rows`` are always positions in the batch (0..R-1), int64, on the logits' device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from octavo.sample.logprobs import LogprobsTensors
from octavo.sample.shaping import RepeatedRow
from octavo.sample.token_pool import TokenPool
from octavo_kernels import SamplingRows


@dataclass
class SamplerOutput:
    """One step's tokens. ``invalid`` marks rows that had nothing to choose from (a NaN or +inf among the logits, or
    every token forbidden): their token is a valid id without meaning, and the request should end with an error."""

    sampled_token_ids: Tensor  # int64 [R]
    invalid: Tensor  # bool [R]
    logprobs: LogprobsTensors | None = None  # rows that asked for none hold padding


@dataclass
class TokenLogits:
    """Single logits, flattened over the batch: (rows[i], token_ids[i]), both int64 [N]."""

    rows: Tensor
    token_ids: Tensor
    values: Tensor | None = None  # float32 [N]; None: forbidden


@dataclass
class RowBitmask:
    """Rows with a bitmask of allowed tokens: bit ``id % 32`` of word ``id // 32``."""

    rows: Tensor  # [N]
    bitmask: Tensor  # int32 [N, ceil(V / 32)]


@dataclass
class BadWords:
    """Every bad word of the batch: token ``last`` is forbidden where the output ends with ``prefix``."""

    rows: Tensor  # [N]
    slots: Tensor  # [N] of the token pool; 0 where the prefix is empty
    prefix: Tensor  # int64 [N, W], right-aligned, -1: nothing to match
    prefix_len: Tensor  # int64 [N]
    last: Tensor  # int64 [N]
    positions: Tensor  # int64 [N] of the token to be sampled
    prompt_len: Tensor  # int64 [N]


@dataclass
class Penalties:
    """Rows with a repetition, frequency or presence penalty."""

    rows: Tensor  # [N]
    slots: Tensor  # [N] of the token history
    count_slots: Tensor  # [N] of the output counts; -1: neither frequency nor presence
    positions: Tensor  # int64 [N]: number of tokens so far
    max_position: int
    repetition: Tensor  # float32 [N, 1]
    frequency: Tensor  # float32 [N, 1]
    presence: Tensor  # float32 [N, 1]
    any_counts: bool


@dataclass
class TokenAppend:
    """Rows whose sampled token is appended in the pool: to history[slots, positions] and counts[count_slots]."""

    rows: Tensor
    slots: Tensor
    positions: Tensor
    count_rows: Tensor | None
    count_slots: Tensor | None


@dataclass
class RandomRows:
    """Rows that draw at random. ``keys`` int32 [N, 2]: the random stream's identity at this position."""

    rows: Tensor
    temperature: Tensor  # float32 [N, 1]
    keys: Tensor
    top_k: Tensor | None = None  # int64 [N], vocabulary size where off; None: no truncation in these rows
    top_p: Tensor | None = None  # float64 [N], 1 where off
    min_p: Tensor | None = None  # float64 [N], 0 where off


@dataclass
class ExcludingRows:
    """Rows that draw with XTC. ``applies`` bool [N]: in this step."""

    rows: RandomRows  # with top_k, top_p and min_p
    thresholds: Tensor  # float32 [N, 1]
    applies: Tensor


@dataclass
class ApartRows:
    """Rows that only torch can draw, in a step of which kernels draw the others."""

    rows: Tensor  # int64 [N]
    metadata: SamplingMetadata  # of these rows alone, but for their grammars


@dataclass
class NamedTokens:
    """Tokens whose log-probabilities are wanted whatever their rank, flattened over the batch: all int64 [N]."""

    places: Tensor  # among the rows with log-probabilities
    columns: Tensor  # of the answer, from 1: the first is the sampled token's
    token_ids: Tensor


@dataclass
class SamplingMetadata:
    """Either ``kernel_rows`` says how to draw, for kernels, or greedy_rows, plain and truncated do."""

    num_rows: int
    pool: TokenPool
    kernel_rows: SamplingRows | None = None  # its constraints are made of the fields below
    apart: ApartRows | None = None  # of kernel_rows
    greedy_rows: Tensor | None = None  # None: none
    plain: RandomRows | None = None
    truncated: RandomRows | None = None  # with top_k, top_p or min_p
    allowed: RowBitmask | None = None
    bad_words: BadWords | None = None
    min_tokens: TokenLogits | None = None
    logit_bias: TokenLogits | None = None
    penalties: Penalties | None = None
    repeated: list[RepeatedRow] | None = None  # with DRY
    sigma: tuple[Tensor, Tensor] | None = None  # rows with top-n-sigma, and n float32 [N, 1]
    excluding: ExcludingRows | None = None  # which draw with XTC: neither in plain nor in truncated
    append: TokenAppend | None = None
    logprobs_rows: Tensor | None = None
    num_logprobs: int | None = None  # most alternatives any row asks for; the vocabulary's size for -1
    named: NamedTokens | None = None
    grammar_bitmask: Tensor | None = None  # int32 [R, ceil(V / 32)], bit set: allowed; filled in by the runner

    @property
    def changes_logits(self) -> bool:
        """True if a row's logits are anything but the model's before the draw."""
        changes = (self.grammar_bitmask, self.allowed, self.bad_words, self.min_tokens, self.logit_bias, self.penalties)
        return any(change is not None for change in (*changes, self.repeated, self.sigma))

    @property
    def is_greedy_only(self) -> bool:
        """True if every row takes its best token as the logits stand, and nothing else is asked for."""
        more = (self.plain, self.truncated, self.excluding, self.apart, self.logprobs_rows, self.append)
        return not self.changes_logits and all(part is None for part in more)


def take_rows(logits: Tensor, rows: Tensor) -> Tensor:
    """The rows' logits, without a copy when they are all of them (rows are unique and ascending)."""
    return logits if rows.numel() == logits.shape[0] else logits.index_select(0, rows)
