"""What `octavo_kernels.sample` is told about the rows of a step, and what it answers.

Everything that differs from row to row is a tensor, so that a step can be captured in a graph and replayed with other
requests in other rows: requests keep their parameters in a table on the device, and a step names their entries.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class SamplingTable:
    """How each of S requests wants to be sampled."""

    temperature: Tensor  # float32 [S], 0: the best token
    top_k: Tensor  # int64 [S], the vocabulary's size where off
    top_p: Tensor  # float64 [S], 1 where off
    min_p: Tensor  # float64 [S], 0 where off
    streams: Tensor  # int64 [S], the identity of the request's random stream


@dataclass
class Constraints:
    """What changes the logits of some rows before the draw, in this order. R rows, vocabulary V."""

    # A bit for each token, set where it is allowed: of row i, row bitmask_index[i] of the masks; -1: every token.
    bitmask: Tensor  # int32 [N, ceil(V / 32)]
    bitmask_index: Tensor  # int32 [R]
    # Added to single logits: row i has the entries edit_start[i] : edit_start[i + 1]. -inf forbids a token.
    edit_start: Tensor  # int32 [R + 1]
    edit_ids: Tensor  # int32 [E]
    edit_values: Tensor  # float32 [E]
    # Penalties of the tokens whose bit is set in row seen_index[i] of `seen`; -1: none. `counts` says how often a
    # token was output, in row counts_index[i]; -1: the row has neither frequency nor presence penalty.
    seen: Tensor  # int32 [slots, ceil(V / 32)]
    seen_index: Tensor  # int32 [R]
    counts: Tensor  # int32 [count slots, V]
    counts_index: Tensor  # int32 [R]
    repetition: Tensor  # float32 [R], 1 where off
    frequency: Tensor  # float32 [R]
    presence: Tensor  # float32 [R]


@dataclass
class SamplingRows:
    """The rows of a step."""

    table: SamplingTable
    index: Tensor  # int64 [R], each row's entry of the table; -1: a row of padding, which gets token 0
    positions: Tensor  # int64 [R], absolute position of the token that the row is about to get
    truncated: bool  # whether top_k, top_p or min_p may be on in any row
    constraints: Constraints | None = None


@dataclass
class SampledRows:
    """``invalid`` marks rows that had nothing to choose from (a NaN or +inf among the logits, or every token
    forbidden); their token is 0."""

    token_ids: Tensor  # int64 [R]
    invalid: Tensor  # bool [R]
