"""The state of running sequences between steps: one row each, kept in place for the sequence's whole life.

A step gathers its rows by index; nothing is moved when others come and go.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from octavo.interface.images import ImageItem
from octavo.interface.step import CachedRequestData, NewRequestData, SchedulerOutput
from octavo.layers.attention import StepImages
from octavo.sample import devices
from octavo.worker.sequence_states import SequenceStates
from octavo_kernels.attention_metadata import AttentionMetadata, for_groups

_NO_SHIFTS = np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64)


class InputBatch:
    """Rows of token ids, block tables and counters for up to ``max_num_reqs`` sequences (host memory)."""

    def __init__(
        self, max_num_reqs: int, max_model_len: int, block_size: int, num_groups: int = 1, state_blocks: int = 0
    ) -> None:
        """``num_groups``: of layers, which have block tables of their own; ``state_blocks``: of a sequence's state."""
        self.states = SequenceStates(max_num_reqs, state_blocks) if state_blocks else None
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        # Not zeroed: memory that no sequence has used costs nothing.
        self.token_ids = np.empty((max_num_reqs, max_model_len + 1), dtype=np.int32)
        self.block_tables = np.zeros((num_groups, max_num_reqs, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_reqs, dtype=np.int64)  # in each group
        self.num_computed = np.zeros(max_num_reqs, dtype=np.int64)
        self.num_kv_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self.num_prompt = np.zeros(max_num_reqs, dtype=np.int64)
        self.adapter_slots = np.full(max_num_reqs, -1, dtype=np.int32)  # -1: no adapter
        # With M-RoPE: what is added to the place of a token after all images for its position; and by row where images
        # end, and what is added before and after each.
        self.position_deltas = np.zeros(max_num_reqs, dtype=np.int64)
        self.position_shifts: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.row_generation = np.zeros(max_num_reqs, dtype=np.int64)  # how many sequences have had the row
        self.highest_block = 0  # that any sequence has had
        self.row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_reqs - 1, -1, -1))

    def add(self, data: NewRequestData) -> int:
        """Fill a free row, and return it."""
        row = self.row_of[data.req_id] = self._free_rows.pop()
        self.token_ids[row, : len(data.token_ids)] = data.token_ids
        self.num_blocks[row] = len(data.block_ids[0])
        self.block_tables[:, row, : self.num_blocks[row]] = data.block_ids
        self.highest_block = max(self.highest_block, *map(max, data.block_ids), *(data.state_pages or ()))
        self.num_computed[row] = data.num_computed_tokens
        self.num_kv_tokens[row] = data.num_kv_tokens
        self.num_prompt[row] = data.num_prompt_tokens
        self.adapter_slots[row] = data.adapter_slot
        self.row_generation[row] += 1
        self._set_shifts(row, data.mm_items or [])
        if self.states is not None and data.state_pages is not None:
            self.states.add(row, data.state_pages, data.num_state_tokens)
        return row

    def _set_shifts(self, row: int, items: list[ImageItem]) -> None:
        shifts = np.cumsum([0, *(item.position_shift for item in items)])
        self.position_deltas[row] = shifts[-1]
        if shifts[-1]:
            self.position_shifts[row] = np.array([item.end for item in items]), shifts

    def rotary_positions(self, rows: np.ndarray, counts: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The positions by which text is turned, int64 [T], of ``counts`` tokens of the sequences ``rows``, both int64
        [R], at ``places`` int64 [T]. Of images they are not used."""
        deltas = np.repeat(self.position_deltas[rows], counts)
        end = 0
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            start, end = end, end + count
            images, shifts = self.position_shifts.get(row, _NO_SHIFTS)
            if len(images) and places[start] < images[-1]:
                deltas[start:end] = shifts[np.searchsorted(images, places[start:end], side="right")]
        positions: np.ndarray = places + deltas
        return positions

    def update_blocks(self, data: CachedRequestData) -> None:
        """Replace and append block ids of a sequence's row."""
        row = self.row_of[data.req_id]
        for group, index, block_id in data.replaced_blocks:
            self.block_tables[group, row, index] = block_id
        if data.new_block_ids:
            end = self.num_blocks[row] + len(data.new_block_ids[0])
            self.block_tables[:, row, self.num_blocks[row] : end] = data.new_block_ids
            self.num_blocks[row] = end
            self.highest_block = max(self.highest_block, *map(max, data.new_block_ids))
        if self.states is not None and data.state_pages is not None:
            self.states.move(row, data.state_pages)
            self.highest_block = max(self.highest_block, *data.state_pages)
        if self.states is not None and data.snapshot is not None:
            self.states.snapshot(row, *data.snapshot)
            self.highest_block = max(self.highest_block, *data.snapshot[1])

    def end_step(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """A step has computed the sequences ``rows`` up to ``positions``, int64 [R] both, drafts included."""
        self.num_computed[rows] = positions
        if self.states is not None:
            self.states.end_step(rows, positions)

    def put_tokens(self, step: SchedulerOutput) -> None:
        """Write down the last known tokens that ``step`` tells, and how far their sequences are computed before it:
        which drafts were right is known where they were sampled."""
        drafts, counts = step.scheduled_spec_decode_tokens, step.num_scheduled_tokens
        rows = np.array([self.row_of[req_id] for req_id in step.last_tokens], dtype=np.int64)
        known = [counts[req_id] - len(drafts.get(req_id, ())) for req_id in step.last_tokens]
        token_ids, positions = np.array(list(step.last_tokens.values()), dtype=np.int64).T
        self.token_ids[rows, positions] = token_ids
        self.num_computed[rows] = positions + 1 - known

    def remove(self, req_id: str) -> int | None:
        """Give the row up; None when the sequence never had one."""
        row = self.row_of.pop(req_id, None)
        if row is not None:
            self._free_rows.append(row)
            self.position_shifts.pop(row, None)
        return row

    def check_integrity(self) -> None:
        """Raise AssertionError unless every row is either free or one sequence's."""
        used = list(self.row_of.values())
        assert len(set(used)) == len(used) and not set(used) & set(self._free_rows), "a row is used twice"
        assert len(used) + len(self._free_rows) == len(self.num_blocks), "a row is lost"


class StepInputs:
    """One step's tensors, made from the rows of an InputBatch.

    R sequences in the order of ``rows``, T tokens padded to a multiple of ``pad_to`` (token 0, position 0, slot -1).
    """

    def __init__(self, batch: InputBatch, rows: np.ndarray, num_scheduled: np.ndarray, pad_to: int) -> None:
        """``rows``, ``num_scheduled``: int64 [R], every count at least 1."""
        computed = batch.num_computed[rows]
        starts = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(num_scheduled, out=starts[1:])
        total = int(starts[-1])
        padded = -(-total // pad_to) * pad_to
        sequence_of = np.repeat(np.arange(len(rows)), num_scheduled)
        offsets = np.arange(total) - np.repeat(starts[:-1], num_scheduled)
        positions = np.zeros(padded, dtype=np.int64)
        positions[:total] = computed[sequence_of] + offsets
        real = positions[:total]
        token_rows = rows[sequence_of]
        input_ids = np.zeros(padded, dtype=np.int64)
        input_ids[:total] = batch.token_ids[token_rows, real]
        slots = np.full((len(batch.block_tables), padded), -1, dtype=np.int64)
        block_ids = batch.block_tables[:, token_rows, real // batch.block_size].astype(np.int64)
        slots[:, :total] = block_ids * batch.block_size + real % batch.block_size
        slots[:, :total][:, real < batch.num_kv_tokens[token_rows]] = -1
        seq_lens = (computed + num_scheduled).astype(np.int32)
        max_seq_len = int(seq_lens.max())
        num_columns = -(-max_seq_len // batch.block_size)

        self.images: StepImages | None = None  # of the step's tokens
        self.rows = rows
        self.starts = starts
        self.seq_lens = seq_lens
        self.input_ids = torch.from_numpy(input_ids)
        self.positions = torch.from_numpy(positions)
        self.rotary_positions = self.positions  # by which queries and keys are turned, unless as `images` says
        if batch.position_shifts:
            turned = positions.copy()
            turned[:total] = batch.rotary_positions(rows, num_scheduled, real)
            self.rotary_positions = torch.from_numpy(turned)
        self.block_tables = torch.from_numpy(np.ascontiguousarray(batch.block_tables[:, rows, :num_columns]))
        self.slots = torch.from_numpy(slots)
        first = AttentionMetadata(
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(seq_lens),
            block_table=self.block_tables[0],
            slot_mapping=self.slots[0],
            max_query_len=int(num_scheduled.max()),
            max_seq_len=max_seq_len,
            num_actual_tokens=total,
            query_start_loc_cpu=starts,
        )
        self.metadata = for_groups(first, self.block_tables, self.slots)
        self.state = None
        if batch.states is not None:
            self.state = batch.states.metadata(rows, computed, first.query_start_loc)

    @property
    def num_tokens(self) -> int:
        """T without padding."""
        return self.metadata[0].num_actual_tokens

    def to(self, device: torch.device) -> None:
        """Bring the tensors to a device, without waiting for it."""
        first, put = self.metadata[0], partial(devices.put, device=device)
        same = self.rotary_positions is self.positions
        self.input_ids, self.positions = put(self.input_ids), put(self.positions)
        self.rotary_positions = self.positions if same else put(self.rotary_positions)
        self.block_tables, self.slots = put(self.block_tables), put(self.slots)
        first = replace(
            first,
            query_start_loc=put(first.query_start_loc),
            seq_lens=put(first.seq_lens),
            block_table=self.block_tables[0],
            slot_mapping=self.slots[0],
        )
        self.metadata = for_groups(first, self.block_tables, self.slots)
