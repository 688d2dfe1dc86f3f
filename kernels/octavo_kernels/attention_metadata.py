"""Where each row of a step's batch reads and writes its keys and values, and a step of decodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass
class AttentionMetadata:
    """A step's batch of R sequences and T rows (tokens), described for the attention kernels.

    Rows from ``num_actual_tokens`` on are padding: nothing is written for them, attention gives zeros.
    """

    query_start_loc: torch.Tensor  # int32 [R + 1]: rows of sequence r are query_start_loc[r]:query_start_loc[r + 1]
    seq_lens: torch.Tensor  # int32 [R]: KV length of each sequence, this step's tokens included
    block_table: torch.Tensor  # int32 [R, max_blocks]
    slot_mapping: torch.Tensor  # int64 [T]: block * block_size + offset, -1 = do not write
    max_query_len: int  # where host_starts is None, this one and the next are upper bounds
    max_seq_len: int
    num_actual_tokens: int
    # The host's copy of query_start_loc, where it has one: launches can then leave out what nobody needs. None in steps
    # that are captured, which serve other sequences later. Every sequence must have tokens, every row a sequence.
    host_starts: NDArray[np.int32] | None = None
    # What kernels worked out for the first layer and use for the others: lengths must not change under an object.
    plans: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass
class DecodeStep:
    """A step in which each of R sequences computes one token: what `octavo_kernels.decode_inputs` makes of its rows.

    Padding has token 0 and position 0, length 0, slot -1 and 0 as its next position.
    """

    token_ids: torch.Tensor  # int64 [R]
    positions: torch.Tensor  # int64 [R], of these tokens
    next_positions: torch.Tensor  # int64 [R], of the tokens that the rows are about to get
    seq_lens: torch.Tensor  # int32 [R], this step's token included
    slot_mapping: torch.Tensor  # int64 [R], as in AttentionMetadata
    block_table: (
        torch.Tensor
    )  # int32 [R, max_blocks]: entries that a sequence's length does not ask for may be anything
