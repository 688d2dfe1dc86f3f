"""A step's constraints as the sampling kernel takes them, which applies them while it reads the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.sample.constraints import match_bad_words
from octavo.sample.metadata import SamplingMetadata
from octavo_kernels import Constraints


def gather_constraints(metadata: SamplingMetadata) -> Constraints | None:
    """None when no row has any. Reads no tensor on the host."""
    m = metadata
    parts = (m.grammar_bitmask, m.allowed, m.bad_words, m.min_tokens, m.logit_bias, m.penalties)
    if all(part is None for part in parts):
        return None
    assert m.kernel_rows is not None and m.pool.seen is not None
    device = m.kernel_rows.index.device
    bitmask, bitmask_index = _bitmasks(m, device)
    start, ids, values = _edits(m, device)
    no_slot = torch.full((m.num_rows,), -1, dtype=torch.int32, device=device)
    seen_index, counts_index = no_slot, no_slot
    repetition = torch.ones(m.num_rows, device=device)
    frequency, presence = torch.zeros_like(repetition), torch.zeros_like(repetition)
    if m.penalties is not None:
        p = m.penalties
        seen_index = no_slot.index_copy(0, p.rows, p.slots.to(torch.int32))
        counts_index = no_slot.index_copy(0, p.rows, p.count_slots.to(torch.int32))
        repetition.index_copy_(0, p.rows, p.repetition[:, 0])
        frequency.index_copy_(0, p.rows, p.frequency[:, 0])
        presence.index_copy_(0, p.rows, p.presence[:, 0])
    return Constraints(
        bitmask, bitmask_index, start, ids, values, m.pool.seen, seen_index, m.pool.counts, counts_index,
        repetition, frequency, presence,
    )  # fmt: skip


def _bitmasks(m: SamplingMetadata, device: torch.device) -> tuple[Tensor, Tensor]:
    if m.grammar_bitmask is not None:
        index = torch.arange(m.num_rows, dtype=torch.int32, device=device)
        if m.allowed is None:
            return m.grammar_bitmask.contiguous(), index
        both = m.grammar_bitmask.clone()
        both[m.allowed.rows] &= m.allowed.bitmask
        return both, index
    index = torch.full((m.num_rows,), -1, dtype=torch.int32, device=device)
    if m.allowed is None:
        return index, index
    index[m.allowed.rows] = torch.arange(len(m.allowed.rows), dtype=torch.int32, device=device)
    return m.allowed.bitmask.contiguous(), index


def _edits(m: SamplingMetadata, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Changes of single logits, sorted by row: where each row's begin int32 [R + 1], token ids int32 [N], what is added
    float32 [N]."""
    rows, ids, values = [], [], []
    if m.bad_words is not None:
        match = match_bad_words(m.bad_words, m.pool)
        rows.append(m.bad_words.rows)
        ids.append(m.bad_words.last)
        values.append(torch.where(match, -torch.inf, 0.0))
    for change in (m.min_tokens, m.logit_bias):
        if change is not None:
            rows.append(change.rows)
            ids.append(change.token_ids)
            forbidden = torch.full((len(change.rows),), -torch.inf, device=device)
            values.append(forbidden if change.values is None else change.values)
    if not rows:
        nothing = torch.zeros(m.num_rows + 1, dtype=torch.int32, device=device)
        return nothing, nothing, torch.zeros(1, device=device)
    by_row, order = torch.cat(rows).sort(stable=True)
    starts = torch.searchsorted(by_row, torch.arange(m.num_rows + 1, device=device), out_int32=True)
    return starts, torch.cat(ids)[order].to(torch.int32), torch.cat(values)[order].float()
