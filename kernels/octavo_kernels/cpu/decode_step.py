"""The inputs of a decode step, computed in C."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from octavo_kernels.attention_metadata import AttentionMetadata
from octavo_kernels.cpu.library import get_library


class DecodeInputs:
    """Fills the inputs of steps in which every sequence computes a token or a few, from the arrays of a batch.

    Two dozen numpy operations would take some per cent of a small model's step. Arrays and tensors must not move.
    The batch is ``num_computed``, ``num_kv_tokens`` int64 [S], ``token_ids`` int32 [S, ...] and ``blocks`` int32
    [groups, S, ...]. Filled are ``input_ids`` and ``positions`` int64, and ``metadata`` of each group of layers. Raises
    RuntimeError without the C kernels.
    """

    def __init__(
        self,
        num_computed: np.ndarray,
        num_kv_tokens: np.ndarray,
        token_ids: np.ndarray,
        blocks: np.ndarray,
        block_size: int,
        input_ids: Tensor,
        positions: Tensor,
        metadata: list[AttentionMetadata],
    ) -> None:
        library = get_library()
        if library is None:
            raise RuntimeError("the CPU kernels are unavailable")
        self._library = library
        self._keep = (num_computed, num_kv_tokens, token_ids, blocks, input_ids, positions, metadata)
        self._addresses = []  # of each group
        for group, table in zip(metadata, blocks, strict=True):
            batch = (num_computed, num_kv_tokens, token_ids, table)
            rest = (group.slot_mapping, group.query_start_loc, group.seq_lens, group.block_table)
            filled = (input_ids, positions, *rest)
            self._addresses.append((*(a.ctypes.data for a in batch), *(t.data_ptr() for t in filled)))
        self._sizes = token_ids.shape[1], blocks.shape[2], metadata[0].block_table.shape[1], block_size

    def fill(self, rows: np.ndarray, counts: np.ndarray | None = None, ahead: int = 0) -> None:
        """Fill the inputs of a step of ``counts`` int64 [R] tokens, one of each by default, of sequences ``rows`` int64
        [R] of the batch. ``ahead``: the tokens are those so many places further on."""
        pack, count = self._library.pack, len(rows)
        which = rows.ctypes.data, 0 if counts is None else counts.ctypes.data
        ops = [pack("decode_inputs", *which, *addresses, count, ahead, *self._sizes) for addresses in self._addresses]
        self._library.run(b"".join(ops), 1)
