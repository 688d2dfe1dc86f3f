"""Keys and values that the rows of a step read and write, and the inputs of a decode step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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
    max_query_len: int  # where query_start_loc_cpu is None, this one and the next are upper bounds
    max_seq_len: int
    num_actual_tokens: int
    # The host's copy of query_start_loc, if there is one: launches then skip work that no sequence needs. None in
    # captured steps, which are replayed with other sequences. Every sequence must have tokens, every row a sequence.
    query_start_loc_cpu: NDArray[np.int32] | None = None
    # Results of the first layer that the others use again: lengths of an object must not change.
    plans: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )


def for_groups(first: AttentionMetadata, block_tables: torch.Tensor, slots: torch.Tensor) -> list[AttentionMetadata]:
    """``first`` and what differs from it for further groups of layers: tables ``block_tables`` int32 ``[groups, R,
    max_blocks]`` and ``slots`` int64 ``[groups, T]``, of which ``first`` has the first ones."""
    metadata = [first]
    for table, slot_mapping in zip(block_tables[1:], slots[1:], strict=True):
        metadata.append(replace(first, block_table=table, slot_mapping=slot_mapping))
        metadata[-1].plans = first.plans  # they follow from the lengths
    return metadata


@dataclass
class DecodeStep:
    """Inputs of a step in which each of R sequences computes one token: what `octavo_kernels.decode_inputs` returns.

    Padding rows have token, position, length and next position 0, and slot -1.
    """

    token_ids: torch.Tensor  # int64 [R]
    positions: torch.Tensor  # int64 [R], of these tokens
    next_positions: torch.Tensor  # int64 [R], of the tokens that the rows are about to get
    seq_lens: torch.Tensor  # int32 [R], this step's token included
    slots: torch.Tensor  # int64 [groups, R], each as slot_mapping in AttentionMetadata
    block_tables: torch.Tensor  # int32 [groups, R, max_blocks]; entries beyond a sequence's length may hold anything
