"""Constraints on tokens: grammar and allowed-token bitmasks, bad words, min_tokens, logit_bias.

All functions change the logits (float32 [R, V]) in place; a forbidden token's logit becomes -inf.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.sample import devices
from octavo.sample.metadata import BadWords, RowBitmask, SamplingMetadata, TokenLogits, take_rows
from octavo.sample.token_pool import TokenPool
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
        bitmask,
        bitmask_index,
        start,
        ids,
        values,
        m.pool.seen,
        seen_index,
        m.pool.counts,
        counts_index,
        repetition,
        frequency,
        presence,
    )


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


def pack_bitmask(token_ids: Tensor, vocab_size: int) -> Tensor:
    """int32 [ceil(V / 32)] with the bits of ``token_ids`` (int64 [N]) set: bit ``id % 32`` of word ``id // 32``."""
    bits = torch.zeros(-(-vocab_size // 32) * 32, dtype=torch.int64)
    bits[token_ids] = 1
    words = (bits.view(-1, 32) << torch.arange(32)).sum(-1)
    return words.to(torch.int32)  # keeps the low 32 bits


def apply_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """Forbid every token whose bit is 0. ``bitmask`` int32 [R, ceil(V / 32)], on the logits' device."""
    vocab_size = logits.shape[1]
    if devices.on_cpu(logits):
        octets = bitmask.contiguous().numpy().view(np.uint8)
        outside = np.unpackbits(~octets, axis=-1, count=vocab_size, bitorder="little")
        logits.masked_fill_(torch.from_numpy(outside).view(torch.bool), -torch.inf)
        return
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    bits = bitmask[:, :, None].bitwise_right_shift(shifts).bitwise_and_(1)
    forbidden = (bits == 0).view(len(bitmask), -1)[:, :vocab_size]
    logits.masked_fill_(forbidden, -torch.inf)


def apply_allowed(logits: Tensor, allowed: RowBitmask) -> None:
    """allowed_token_ids: forbid every other token of those rows."""
    rows = take_rows(logits, allowed.rows)
    apply_bitmask(rows, allowed.bitmask)
    if rows is not logits:
        logits.index_copy_(0, allowed.rows, rows)


def apply_min_tokens(logits: Tensor, stops: TokenLogits) -> None:
    """Forbid EOS and stop tokens of rows that have not reached min_tokens."""
    logits[stops.rows, stops.token_ids] = -torch.inf


def apply_logit_bias(logits: Tensor, bias: TokenLogits) -> None:
    """logit_bias: add ``bias.values``."""
    assert bias.values is not None
    logits[bias.rows, bias.token_ids] += bias.values  # a request's ids are distinct


def match_bad_words(words: BadWords, pool: TokenPool) -> Tensor:
    """bool [N]: whether the output ends with all tokens of the bad word but its last."""
    match = words.positions - words.prompt_len >= words.prefix_len
    width = words.prefix.shape[1]
    if width:
        at = words.positions[:, None] - torch.arange(width, 0, -1, device=words.rows.device)
        is_padding = words.prefix < 0
        tail = pool.history[words.slots[:, None], at.clamp(min=0).masked_fill_(is_padding, 0)]
        match &= ((tail == words.prefix) | is_padding).all(-1)
    return match


def apply_bad_words(logits: Tensor, words: BadWords, pool: TokenPool) -> None:
    """Forbid the last token of each bad word whose other tokens are what the output ends with."""
    # amin, because two words may forbid the same token and only one of them match
    floor = torch.where(match_bad_words(words, pool), -torch.inf, torch.inf)
    logits.view(-1).scatter_reduce_(0, words.rows * logits.shape[1] + words.last, floor, "amin")
