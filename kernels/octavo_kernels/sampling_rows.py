"""Arguments and results of `octavo_kernels.sample`.

Everything that differs between rows is a tensor, so that a step can be captured in a graph and replayed with other
requests: the parameters of requests are in a table on the device, and a step names their entries.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class SamplingTable:
    """The sampling parameters of S requests."""

    temperature: Tensor  # float32 [S], 0: greedy
    top_k: Tensor  # int64 [S], the vocabulary's size where off
    top_p: Tensor  # float64 [S], 1 where off
    min_p: Tensor  # float64 [S], 0 where off
    streams: Tensor  # int64 [S], the identity of the request's random stream


@dataclass
class Constraints:
    """Changes of the logits of some rows before the draw, in this order. R rows, vocabulary V."""

    # A bit for each token, set if it is allowed. Row i has row bitmask_index[i] of the masks; -1: all are allowed.
    bitmask: Tensor  # int32 [N, ceil(V / 32)]
    bitmask_index: Tensor  # int32 [R]
    # Added to single logits. Row i has the entries edit_start[i] : edit_start[i + 1]; -inf forbids a token.
    edit_start: Tensor  # int32 [R + 1]
    edit_ids: Tensor  # int32 [E]
    edit_values: Tensor  # float32 [E]
    # Penalties of the tokens whose bit is set in row seen_index[i] of `seen`; -1: none. Row counts_index[i] of `counts`
    # has the number of times each token was output; -1: neither frequency nor presence penalty.
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
    index: Tensor  # int64 [R], each row's entry in the table; -1: a padding row, which gets token 0
    positions: Tensor  # int64 [R], absolute position of the sampled token
    truncated: bool  # whether any row may have top_k, top_p or min_p
    constraints: Constraints | None = None


@dataclass
class SampledRows:
    """The sampled tokens. ``invalid`` marks rows that cannot be sampled: a NaN or +inf among the logits, or every token
    forbidden. Their token is 0.
    """

    token_ids: Tensor  # int64 [R]
    invalid: Tensor  # bool [R]
