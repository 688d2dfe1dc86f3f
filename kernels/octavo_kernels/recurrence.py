"""States of recurrent layers: where a layer's part of them lies, and which rows a step has of which sequences.

A state is what a layer keeps of a sequence however long it is: the last ``taps - 1`` inputs of its convolution and,
unless it is a convolution alone, for each value head a matrix ``[key_size, value_size]``. It is kept in float32, cut
into granules of one size that lie in the blocks of the KV cache's pool: ``columns`` columns of one head's matrix
``[key_size, columns]``, or ``[taps - 1, channels_of_granule]`` inputs. Granule number g of a sequence is in the block
``pages[g // granules_of_block]``, as number ``g % granules_of_block``.

A step commits what is certain: of the rows that a sequence has pending from the step before and those of this step all
but the last ``num_kept``, which are pending for the next one. A row that is never committed leaves no trace. On the way
the state may be written elsewhere too, as it is between two rows: a snapshot, which nothing adds to.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class StateMetadata:
    """The R sequences of a step; tensors are int32."""

    query_start_loc: Tensor  # [R + 1]: where each one's rows begin; rows behind the last one are padding
    num_tokens: Tensor  # [R]: tokens that the state has seen; of 0 it is zeros, whatever the pages hold
    num_pending: Tensor  # [R]: rows that were pending before the step
    num_kept: Tensor  # [R]: rows that are pending after it, all of them the step's own
    num_before: Tensor  # [R]: committed rows, but not all, before the snapshot: one of the step's own at least; 0: none
    batch_rows: Tensor  # [R]: where among pending rows the sequence's are
    read_pages: Tensor  # [R, blocks of a state]
    write_pages: Tensor  # [R, blocks of a state]: where the state goes; the same unless another one holds those
    snapshot_pages: Tensor  # [R, blocks of a state]: where the snapshot goes, if there is one


@dataclass(frozen=True)
class LayerState:
    """One layer's part of all states, and the rows that are pending, of S sequences up to M each (float32)."""

    pool: Tensor  # uint8 [blocks, bytes of a block]
    granules_of_block: int
    granule_bytes: int
    first_matrix: int  # the number of the granule with which the layer's matrices begin, head after head
    first_window: int  # ... and its inputs, channel after channel
    columns: int
    channels_of_granule: int
    inputs: Tensor  # [S, M, channels]
    keys: Tensor  # [S, M, key_heads, key_size]
    updates: Tensor  # [S, M, value_heads, value_size]: what is written for each key
    decays: Tensor  # [S, M, value_heads]
