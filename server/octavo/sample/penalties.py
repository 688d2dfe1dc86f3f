"""Repetition (Keskar et al. 2019), frequency and presence penalties (OpenAI).

Only tokens that a request has seen change, so the work is that of its history, not of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.sample.metadata import Penalties, TokenAppend
from octavo.sample.token_pool import TokenPool


def apply_penalties(logits: Tensor, penalties: Penalties, pool: TokenPool) -> None:
    """In place on float32 [R, V]. Repetition counts prompt and output tokens, the other two the output alone."""
    seen = pool.history[penalties.slots, : penalties.max_position].long()
    columns = torch.arange(penalties.max_position, device=logits.device)
    # Beyond a row's own length: its first token again, which changes nothing.
    seen = torch.where(columns < penalties.positions[:, None], seen, seen[:, :1])
    flat = penalties.rows[:, None] * logits.shape[1] + seen
    values = logits.view(-1)[flat]
    values = torch.where(values > 0, values / penalties.repetition, values * penalties.repetition)
    if penalties.any_counts:
        counts = pool.counts[penalties.count_slots[:, None].clamp(min=0), seen]
        counts = torch.where(penalties.count_slots[:, None] >= 0, counts, 0)
        values = values - penalties.frequency * counts - penalties.presence * (counts > 0)
    logits.view(-1)[flat] = values  # a token seen twice is written twice with the same value


def append_tokens(sampled: Tensor, append: TokenAppend, pool: TokenPool) -> None:
    """Append the sampled tokens (int64 [R]) of the rows that keep a history."""
    pool.history[append.slots, append.positions] = sampled[append.rows].to(torch.int32)
    if pool.seen is not None:
        tokens = sampled[append.rows]
        at = append.slots, tokens >> 5
        pool.seen[at] |= (1 << (tokens & 31)).to(torch.int32)
    if append.count_rows is not None:
        pool.counts[append.count_slots, sampled[append.count_rows]] += 1
