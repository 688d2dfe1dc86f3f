"""What a decode step needs of every row, kept on the device, so that a step in which only tokens were added needs
nothing from the host but which rows it is about.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import octavo_kernels
from octavo.sample import devices
from octavo.worker.input_batch import InputBatch
from octavo_kernels import AttentionMetadata, DecodeStep

PADDING = -1  # the row of a step's padding: the last one, counted from the end


class DeviceState:
    """``max_num_reqs`` rows as in `InputBatch`, and a last one that is nobody's, for PADDING.

    ``last_tokens`` [rows] is the token that a row computes next, ``num_computed`` how many it has computed,
    ``num_kv_tokens`` the positions below which keys and values are never written (they are shared). A step of captured
    decodes has at most ``max_step`` rows.
    """

    def __init__(
        self, max_num_reqs: int, max_blocks: int, block_size: int, max_step: int, device: torch.device
    ) -> None:
        rows = max_num_reqs + 1
        self.device, self.block_size = device, block_size
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.num_computed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.num_kv_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        self._starts = torch.arange(max_step + 1, dtype=torch.int32, device=device)
        self._max_model_len = max_blocks * block_size

    def put(self, array: NDArray) -> Tensor:  # type: ignore[type-arg]
        """A copy on the device that the host need not wait for."""
        placed = devices.put(array, self.device)
        return placed.clone() if self.device.type == "cpu" else placed

    def set_rows(self, batch: InputBatch, rows: NDArray[np.int64]) -> None:
        """Bring new rows of ``batch`` over."""
        index = self.put(rows)
        self.set_computed(batch, rows, batch.num_computed[rows])
        self.num_kv_tokens[index] = self.put(batch.num_kv_tokens[rows])
        columns = int(batch.num_blocks[rows].max())
        self.block_table[index, :columns] = self.put(batch.block_table[rows, :columns])

    def set_blocks(self, rows: list[int], columns: list[int], blocks: list[int]) -> None:
        """Entries of the block table: one of them appended or replaced in row ``rows[i]``."""
        index = self.put(np.array([rows, columns], dtype=np.int64))
        self.block_table[index[0], index[1]] = self.put(np.array(blocks, dtype=np.int32))

    def set_computed(self, batch: InputBatch, rows: NDArray[np.int64], values: NDArray[np.int64]) -> None:
        """How many tokens rows have computed, and what ``batch`` knows of the next one (of a prompt; sampled ones come
        from the sampler)."""
        index = self.put(rows)
        self.num_computed[index] = self.put(values)
        self.last_tokens[index] = self.put(batch.token_ids[rows, values].astype(np.int64))

    def decode_inputs(self, rows: Tensor) -> tuple[DecodeStep, AttentionMetadata]:
        """A step in which each of ``rows`` int64 [n] computes one token, which is counted.

        Reads and writes nothing on the host: it can be captured.
        """
        step = octavo_kernels.decode_inputs(
            rows, self.last_tokens, self.num_computed, self.num_kv_tokens, self.block_table, self.block_size
        )
        metadata = AttentionMetadata(
            query_start_loc=self._starts[: len(rows) + 1],
            seq_lens=step.seq_lens,
            block_table=step.block_table,
            slot_mapping=step.slot_mapping,
            max_query_len=1,
            max_seq_len=self._max_model_len,
            num_actual_tokens=len(rows),
        )
        return step, metadata
