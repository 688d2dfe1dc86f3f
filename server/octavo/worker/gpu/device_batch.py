"""The state of every row that a decode step needs, on the device.

A step in which nothing but tokens was added needs no more from the host than which rows it computes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

import octavo_kernels
from octavo.interface.step import CachedRequestData
from octavo.sample import devices
from octavo.worker.gpu.draft_plan import DraftPlan, accept
from octavo.worker.input_batch import InputBatch, StepInputs
from octavo_kernels import AttentionMetadata, DecodeStep
from octavo_kernels.attention_metadata import for_groups


class DeviceBatch:
    """The rows of an `InputBatch` and a last one that is nobody's, for `PADDING`.

    ``last_tokens`` int64 [rows] is the token that a row computes next, ``num_computed`` int64 [rows] how many it has
    computed, ``num_kv_tokens`` int64 [rows] the positions below which keys and values are never written (they are
    shared), ``block_tables`` int32 [groups of layers, rows, max_blocks], ``drafts`` int64 [rows, most drafts] what is
    guessed to follow the last token, ``adapter_slots`` int32 [rows] where its adapter is, -1: it has none. For a
    drafter on the device: ``before_last`` int64 [rows] is the token before the last one, ``room`` int64 [rows] the
    positions that blocks are there for. ``position_deltas`` int64 [rows]: what positions are ahead of places behind all
    images of a sequence (M-RoPE); None: nothing, of any.
    """

    def __init__(
        self,
        host: InputBatch,
        max_decodes: int,
        device: torch.device,
        max_drafts: int = 0,
        has_drafter: bool = False,
        has_adapters: bool = False,
        has_mrope: bool = False,
    ) -> None:
        """``max_decodes``: maximum number of rows of `decode_inputs`; ``max_drafts``: of a sequence in a step;
        ``has_drafter``: it is on the device; ``has_adapters``: rows may have some; ``has_mrope``: positions may not be
        places."""
        num_groups, num_rows, max_blocks = host.block_tables.shape
        num_rows += 1
        self.device, self._host = device, host
        self._has_drafter, self._has_adapters = has_drafter, has_adapters
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.num_computed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.num_kv_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros(num_groups, num_rows, max_blocks, dtype=torch.int32, device=device)
        self.before_last = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.room = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.drafts = torch.zeros(num_rows, max_drafts, dtype=torch.int64, device=device)
        self.adapter_slots = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
        self.position_deltas = torch.zeros(num_rows, dtype=torch.int64, device=device) if has_mrope else None
        self.block_size = host.block_size
        self._starts = torch.arange(max_decodes + 1, dtype=torch.int32, device=device)
        self.max_model_len = max_blocks * host.block_size

    @property
    def most_drafts(self) -> int:
        """The most drafts of a sequence."""
        return self.drafts.shape[1]

    def set_rows(self, rows: np.ndarray) -> None:
        """Copy the new rows ``rows`` int64 [n]."""
        host, index = self._host, self._put(rows)
        self.set_computed(rows, host.num_computed[rows])
        self.num_kv_tokens[index] = self._put(host.num_kv_tokens[rows])
        self.room[index] = self._put(host.num_blocks[rows] * host.block_size)
        columns = int(host.num_blocks[rows].max())
        self.block_tables[:, index, :columns] = self._put(host.block_tables[:, rows, :columns])
        if self._has_adapters:
            self.adapter_slots[index] = self._put(host.adapter_slots[rows])
        if self.position_deltas is not None:
            self.position_deltas[index] = self._put(host.position_deltas[rows])

    def rotary_positions(self, rows: Tensor, positions: Tensor) -> Tensor:
        """The positions by which tokens of ``rows`` at ``positions``, behind all images, are rotated; all int64 [T].
        Can be captured."""
        return positions if self.position_deltas is None else positions + self.position_deltas[rows]

    def set_blocks(self, changes: list[CachedRequestData]) -> None:
        """Copy blocks that were appended or replaced."""
        changed: list[tuple[int, int, int, int]] = []  # group, row, column, block
        for change in changes:
            row = self._host.row_of[change.req_id]
            changed += [(group, row, index, block) for group, index, block in change.replaced_blocks]
            for group, blocks in enumerate(change.new_block_ids):
                first = int(self._host.num_blocks[row]) - len(blocks)
                changed += [(group, row, first + i, block) for i, block in enumerate(blocks)]
        if changed:
            groups, rows, columns, ids = self._put(np.array(changed, dtype=np.int64).T)
            self.block_tables[groups, rows, columns] = ids.int()
            if not self._has_drafter:
                return
            touched = np.unique([self._host.row_of[change.req_id] for change in changes])
            self.room[self._put(touched)] = self._put(self._host.num_blocks[touched] * self._host.block_size)

    def set_computed(self, rows: np.ndarray, num_computed: np.ndarray) -> None:
        """Set how many tokens ``rows`` have computed, and what the host knows of the next one (of a prompt; sampled
        ones come from the sampler). Both int64 [n]."""
        index = self._put(rows)
        self.num_computed[index] = self._put(num_computed)
        self.last_tokens[index] = self._put(self._host.token_ids[rows, num_computed].astype(np.int64))

    def _put(self, array: np.ndarray) -> Tensor:
        return devices.put(array, self.device)

    def decode_inputs(self, rows: Tensor) -> tuple[DecodeStep, list[AttentionMetadata]]:
        """A step in which each of ``rows`` int64 [n] computes one token, which is counted.

        Reads and writes nothing on the host: it can be captured.
        """
        step = octavo_kernels.decode_inputs(
            rows, self.last_tokens, self.num_computed, self.num_kv_tokens, self.block_tables, self._host.block_size
        )
        first = AttentionMetadata(
            query_start_loc=self._starts[: len(rows) + 1],
            seq_lens=step.seq_lens,
            block_table=step.block_tables[0],
            slot_mapping=step.slots[0],
            max_query_len=1,
            max_seq_len=self.max_model_len,
            num_actual_tokens=len(rows),
        )
        return step, for_groups(first, step.block_tables, step.slots)

    def set_drafts(self, rows: np.ndarray, drafts: list[list[int]]) -> None:
        """Set what is guessed to follow the last tokens of ``rows`` int64 [n]."""
        index = np.repeat(rows, [len(tokens) for tokens in drafts])
        columns = np.concatenate([np.arange(len(tokens)) for tokens in drafts])
        tokens = np.fromiter((token for one in drafts for token in one), dtype=np.int64, count=len(index))
        rows_of, columns_of, values = self._put(np.stack([index, columns, tokens])).unbind()
        self.drafts[rows_of, columns_of] = values

    def draft_inputs(self, plan: DraftPlan) -> tuple[Tensor, Tensor, list[AttentionMetadata]]:
        """Token ids and positions, int64 [T], of a step in which each sequence computes its last token and its drafts.
        Nothing is counted.

        Reads and writes nothing on the host: it can be captured.
        """
        rows, offsets = plan.rows, plan.offsets
        positions = torch.where(rows >= 0, self.num_computed[rows] + offsets, 0)
        token_ids = torch.where(offsets > 0, self.drafts[rows, (offsets - 1).clamp(min=0)], self.last_tokens[rows])
        return torch.where(rows >= 0, token_ids, 0), positions, self.metadata(plan, positions, self.most_drafts + 1)

    def metadata(self, plan: DraftPlan, positions: Tensor, width: int) -> list[AttentionMetadata]:
        """Describe a step with the tokens of ``plan`` at ``positions`` int64 [T], those of a sequence one after the
        other and at most ``width``. Keys and values that have no block are not written.

        Reads and writes nothing on the host: it can be captured.
        """
        rows, sequences, size = plan.rows, plan.sequences, self.block_size
        inside = positions.clamp(max=self.max_model_len - 1)
        written = (rows >= 0) & (positions >= self.num_kv_tokens[rows])
        if self._has_drafter:  # which may guess beyond
            written &= positions < self.room[rows]
        slots = self.block_tables[:, rows, inside // size].long() * size + inside % size
        slots = torch.where(written, slots, -1)
        ends = (
            self.num_computed.clone()
        )  # where each sequence's last token is, for the kernel that copies tables so far
        ends[sequences] = inside[(plan.starts[1:] - 1).clamp(min=0)]
        step = octavo_kernels.decode_inputs(
            sequences, self.last_tokens, ends, self.num_kv_tokens, self.block_tables, size
        )
        first = AttentionMetadata(
            query_start_loc=plan.starts.int(),
            seq_lens=step.seq_lens,
            block_table=step.block_tables[0],
            slot_mapping=slots[0],
            max_query_len=width,
            max_seq_len=self.max_model_len,
            num_actual_tokens=len(rows),
        )
        return for_groups(first, step.block_tables, slots)

    def accept(self, plan: DraftPlan, tokens: Tensor, invalid: Tensor) -> Tensor:
        """Have the sequences go on after their right drafts, given what was sampled after each token of ``plan``: ids
        int64 [T], and bool [T] whether there was nothing to sample. Returns how many are right, int64 [S].

        ``num_computed`` must be as before the step. Can be captured.
        """
        drafts = self.drafts[plan.rows, plan.offsets.clamp(max=self.drafts.shape[1] - 1)]
        accepted, last = accept(plan, drafts, tokens, invalid)
        real, rows = plan.counts > 0, plan.sequences
        before, known = self.num_computed[rows], self.last_tokens[rows]
        self.num_computed[rows] = before + torch.where(real, accepted + 1, 0)
        self.last_tokens[rows] = torch.where(real, last, known)
        first = plan.starts[:-1].clamp(max=len(tokens) - 1)
        right = tokens[(first + accepted - 1).clamp(min=0)]  # the last right draft
        earlier = torch.where(accepted > 0, right, known)
        self.before_last[rows] = torch.where(real, earlier, self.before_last[rows])
        return accepted

    def push(self, rows: Tensor, tokens: Tensor) -> None:
        """Have each of ``rows`` int64 [n] go on with its token, int64 [n]. Can be captured."""
        self.before_last[rows] = self.last_tokens[rows]
        self.last_tokens[rows] = tokens

    def sampled_inputs(self, inputs: StepInputs, rows: np.ndarray, counts: np.ndarray, which: np.ndarray) -> None:
        """Fill in what the device alone knows of a step's sequences ``which`` int64 [n] of ``rows``, with ``counts``
        tokens, both int64 [R]: where they are, their last tokens and their drafts."""
        if not len(which):
            return
        some = counts[which]
        at = np.arange(some.sum()) - np.repeat(np.cumsum(some) - some, some)
        index = np.repeat(inputs.starts[which], some) + at
        packed = self._put(np.stack([index, np.repeat(rows[which], some), at]))
        where, row, offset = packed.unbind()
        positions, size = self.num_computed[row] + offset, self._host.block_size
        if self.drafts.shape[1]:
            drafts = self.drafts[row, (offset - 1).clamp(min=0)]
            inputs.input_ids[where] = torch.where(offset > 0, drafts, self.last_tokens[row])
        inputs.positions[where] = positions
        if inputs.rotary_positions is not inputs.positions:
            inputs.rotary_positions[where] = self.rotary_positions(row, positions)
        slots = self.block_tables[:, row, positions // size].long() * size + positions % size
        inputs.slots[:, where] = torch.where(positions >= self.num_kv_tokens[row], slots, -1)
        sequences, row, count = self._put(np.stack([which, rows[which], some])).unbind()
        inputs.metadata[0].seq_lens[sequences] = (self.num_computed[row] + count).int()
